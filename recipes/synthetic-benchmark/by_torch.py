"""PyTorch's DistributedDataParallel: every rank computes, and gradients are averaged bucket by bucket."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import choices
import flops
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
MEMORY_SHARE = 0.9
"""A batch fits if its tensors take no more than this share of the GPU's memory: NCCL and cuDNN want some."""


class Rank:
    """One rank's network and batch.

    Attributes:
        gradient_bytes: what this rank gave to the exchange in its last step, counted bucket by bucket; alone, the size
            of its gradients. Autocast computes in bf16 and leaves gradients in fp32, so a setting does not say it.
    """

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(7)
        self.device, self.arguments = device, arguments
        self.layout = torch.channels_last if arguments.channels_last else torch.contiguous_format
        self.own = torch_network.network(arguments).to(device)
        if arguments.channels_last:
            self.own = self.own.to(memory_format=torch.channels_last)
        self.optimizer = torch_network.optimizer(self.own, arguments, is_fused=device.type == "cuda")
        self.scaler = torch.amp.GradScaler(device.type, enabled=arguments.precision == "fp16")
        self.spans: list[tuple[float, float]] = []
        self.traced = False
        self.gradient_bytes = self._bucket_bytes = 0
        self.ends: list[torch.cuda.Event] = []
        if arguments.batch is None:
            arguments.batch = self.agreed_batch(models.LARGEST_BATCH.get(arguments.model, 256))
        self.batch = self.synthetic(arguments.batch)
        self.parallel = self._parallel() if dist.get_world_size() > 1 else None
        trained = self.parallel or self.own
        self.net = torch.compile(trained) if arguments.compile else trained  # around DDP: so exchange hides behind it

    def _parallel(self) -> DistributedDataParallel:
        bucket = BUCKET_MB / models.SHRINK if self.arguments.model in models.PACED else BUCKET_MB
        parallel = DistributedDataParallel(self.own, bucket_cap_mb=bucket)
        parallel.register_comm_hook(None, self._hook)
        return parallel

    def synthetic(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, classes = torch_network.synthetic(self.arguments, batch, self.device)
        return (inputs.contiguous(memory_format=self.layout) if inputs.ndim == 4 else inputs), classes

    def agreed_batch(self, largest: int) -> int:
        """The largest batch that fits every rank's memory; a trial trains one step without compiling."""
        most = MEMORY_SHARE * torch.cuda.get_device_properties(self.device).total_memory

        def fits(batch: int) -> bool:
            torch.cuda.reset_peak_memory_stats(self.device)
            try:
                self.learn(self.own, self.synthetic(batch))
                return torch.cuda.max_memory_reserved(self.device) <= most
            except torch.cuda.OutOfMemoryError:
                return False
            finally:
                self.optimizer.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()

        found = torch.tensor(choices.fitting(largest, fits), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        torch.cuda.reset_peak_memory_stats(self.device)
        return int(found)

    def learn(self, net: Callable[..., torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """One optimizer step."""
        inputs, classes = batch
        self.optimizer.zero_grad(set_to_none=True)
        with torch_network.autocast(self.arguments.precision, self.device):
            loss = torch_network.loss(net(inputs), classes)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def step(self) -> None:
        """One step with exchange. On a GPU it returns when the step before is done: the CPU is one step ahead, as in
        any training loop, and the time from return to return is a step's.
        """
        self._bucket_bytes = 0
        self.learn(self.net, self.batch)
        if self.parallel is not None:
            self.gradient_bytes = self._bucket_bytes
        elif not self.gradient_bytes:
            self.gradient_bytes = sum(_bytes(each.grad) for each in self.own.parameters() if each.grad is not None)
        if self.device.type == "cuda":
            self.ends.append(torch.cuda.current_stream(self.device).record_event())
            if len(self.ends) > 1:
                self.ends.pop(0).synchronize()

    def alone(self) -> None:
        """A step without exchange."""
        if self.parallel is None:
            self.step()
        else:
            with self.parallel.no_sync():
                self.learn(self.net, self.batch)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def _hook(self, state, bucket):  # without annotations: PyTorch refuses those that are text
        self._bucket_bytes += _bytes(bucket.buffer())
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

        torch.cuda.synchronize(self.device)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(TRACED_STEPS):
                self.step()
            torch.cuda.synchronize(self.device)
        kernels = [event.time_range for event in seen.events() if "nccl" in event.name.lower()]
        return measures.busy_s((each.start / 1e6, each.end / 1e6) for each in kernels) / TRACED_STEPS

    def agreed_steps(self, count: int) -> int:
        """The most steps that a rank wants."""
        found = torch.tensor(count, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def own_device(threads: int) -> tuple[torch.device, choices.Card | None]:
    """One GPU a rank; without GPUs a fixed number of CPU threads."""
    if not torch.cuda.is_available():
        torch.set_num_threads(threads)
        return torch.device("cpu"), None
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device, choices.Card(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def run(arguments: argparse.Namespace) -> int:
    device, card = own_device(arguments.threads)
    arguments = choices.settle(arguments, card, torch_network.lacks_to_compile())
    torch_network.use_tf32(arguments.precision != "fp32")
    torch.backends.cudnn.benchmark = not arguments.as_2017
    dist.init_process_group("gloo" if card is None else "nccl")
    rank = Rank(arguments, device)
    steps = measures.Steps(arguments)
    steps.run(rank.step, rank.agreed_steps)
    size = rank.gradient_bytes
    compute_s = measures.median_s(rank.alone, ALONE_STEPS)  # behind the others: a GPU's first steps are slower
    exchange_s = rank.exchange_s() if dist.get_world_size() > 1 else 0.0
    sent = steps.sent / steps.count if os.environ.get("LOCAL_RANK", "0") == "0" else None
    total = torch.tensor(steps.rate, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    measures.tell(
        steps.last, step_s=steps.step_s, compute_s=compute_s, exchange_s=exchange_s, fabric_bytes=sent,
        batch=steps.items, gradient_bytes=size, **measures.way_of_training(arguments),
    )  # fmt: skip
    name = "cpu" if card is None else card.name
    measures.write(measures.outputs_folder(), str(dist.get_rank()), {
        "size": dist.get_world_size(), "way": "torch", **measures.settings(arguments), "gradient_bytes": size,
        f"{steps.unit}_per_s": steps.rate, f"{steps.unit}_per_s_all": float(total),
        **flops.figures(arguments.model, arguments.sequence, arguments.precision, steps.rate, name),
        "step_s": steps.step_s, "step_s_spread": measures.spread(steps.times_s),
        "compute_s": compute_s, "exchange_s": exchange_s, "fabric_bytes": sent, "steps_s": steps.times_s,
        "gpu_memory_mib": None if card is None else torch.cuda.max_memory_allocated(device) >> 20,
        "device": name, "versions": {"torch": torch.__version__},
    })  # fmt: skip
    dist.destroy_process_group()
    return 0
