"""PyTorch's DistributedDataParallel: every rank computes, and gradients are averaged bucket by bucket."""

from __future__ import annotations

import argparse
import os
import time

import measures
import models
import torch
import torch.distributed as dist
import torch_network
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

ALONE_STEPS = 5
TRACED_STEPS = 3
BUCKET_MB = 25


class Rank:
    """One rank's network and batch."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(7)
        self.device = device
        net = torch_network.network(arguments).to(device)
        bucket = BUCKET_MB / models.SHRINK if arguments.model in models.PACED else BUCKET_MB
        self.net = DistributedDataParallel(net, bucket_cap_mb=bucket) if dist.get_world_size() > 1 else net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        side = models.side(arguments.model)
        self.pixels = torch.rand(arguments.batch, 3, side, side, device=device)
        self.classes = torch.randint(torch_network.CLASSES, (arguments.batch,), device=device)
        self.spans: list[tuple[float, float]] = []
        self.traced = False
        if isinstance(self.net, DistributedDataParallel):
            self.net.register_comm_hook(None, self._hook)

    @property
    def gradient_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.net.parameters() if each.requires_grad)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        torch_network.loss(self.net(self.pixels), self.classes).backward()
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def alone(self) -> None:
        """A step without exchange."""
        if isinstance(self.net, DistributedDataParallel):
            with self.net.no_sync():
                self.step()
        else:
            self.step()

    def _hook(self, state, bucket):  # without annotations: PyTorch refuses those that are text
        began, future = time.perf_counter(), allreduce_hook(state, bucket)
        if not self.traced or self.device.type == "cuda":
            return future

        def ended(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            self.spans.append((began, time.perf_counter()))
            return done.value()

        return future.then(ended)

    def exchange_s(self) -> float:
        """Seconds of exchange per step: on CPUs from a hook around each bucket, on GPUs from the profiler's kernels."""
        self.traced = True
        if self.device.type != "cuda":
            for _ in range(TRACED_STEPS):
                self.step()
            return measures.busy_s(self.spans) / TRACED_STEPS
        from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415  slow to import, and for GPUs alone

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(TRACED_STEPS):
                self.step()
        kernels = [event.time_range for event in seen.events() if "nccl" in event.name.lower()]
        return measures.busy_s((each.start / 1e6, each.end / 1e6) for each in kernels) / TRACED_STEPS


def run(arguments: argparse.Namespace) -> int:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(arguments.threads)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = Rank(arguments, device)
    steps = measures.Steps(arguments.steps, arguments.warmup, arguments.batch)
    steps.run(rank.step)
    compute_s = measures.median_s(rank.alone, ALONE_STEPS)  # behind the others: a GPU's first steps are slower
    exchange_s = rank.exchange_s() if dist.get_world_size() > 1 else 0.0
    sent = steps.sent / arguments.steps if local == 0 else None
    total = torch.tensor(arguments.batch / steps.step_s, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    measures.tell(
        arguments.steps + arguments.warmup, step_s=steps.step_s, compute_s=compute_s, exchange_s=exchange_s,
        fabric_bytes=sent, batch=arguments.batch, gradient_bytes=rank.gradient_bytes,
    )  # fmt: skip
    measures.write(measures.outputs_folder(), str(dist.get_rank()), {
        "size": dist.get_world_size(), "way": "torch", "model": arguments.model, "batch": arguments.batch,
        "gradient_bytes": rank.gradient_bytes, "images_per_s": arguments.batch / steps.step_s,
        "images_per_s_all": float(total), "step_s": steps.step_s, "step_s_spread": measures.spread(steps.times_s),
        "compute_s": compute_s, "exchange_s": exchange_s, "fabric_bytes": sent, "steps_s": steps.times_s,
        "gpu_memory_mib": torch.cuda.max_memory_allocated(device) >> 20 if on_gpu else None,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu", "versions": {"torch": torch.__version__},
    })  # fmt: skip
    dist.destroy_process_group()
    return 0
