"""Train a small convolutional network on Fashion-MNIST with PyTorch's DistributedDataParallel, and check it.

An ordinary script for ``torchrun``: each rank trains on its own part of the images, gradients are averaged, the
learning rate grows with the number of ranks after a warm-up (Goyal et al. 2017, https://arxiv.org/abs/1706.02677).
Rank 0 writes checkpoints to ``$GPURUN_OUTPUTS``; a later start with the same folder continues from the last one, also
with another number of ranks.

Exit codes: 0 trained and accurate enough; 1 not accurate enough; 143 stopped by SIGTERM after a checkpoint.
"""

from __future__ import annotations

import argparse
import gzip
import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

try:
    import gpurun_runtime as gpurun  # in the container of a gpurun job; the script runs without it, too
except ImportError:
    gpurun = None

CLASSES = 10
STOPPED = 128 + signal.SIGTERM
AGREE_EVERY = 10  # steps between asking all ranks whether one of them was told to stop


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--outputs", type=Path, default=os.environ.get("GPURUN_OUTPUTS") or None)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=60_000, help="train on the first so many")
    parser.add_argument("--batch", type=int, default=64, help="images per rank and step")
    parser.add_argument("--learning-rate", type=float, default=0.001, help="of one rank alone")
    parser.add_argument("--warmup", type=float, default=1.0, help="epochs until the learning rate is scaled up")
    parser.add_argument("--accuracy", type=float, default=0.85, help="exit 1 below this test accuracy")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads a rank")
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def read_idx(file: Path) -> torch.Tensor:
    """A tensor of unsigned bytes in the IDX format (http://yann.lecun.com/exdb/mnist), gzipped."""
    data = gzip.decompress(file.read_bytes())
    if data[:3] != b"\0\0\x08":
        raise SystemExit(f"{file}: not an IDX file of unsigned bytes")
    shape = np.frombuffer(data, dtype=">i4", count=data[3], offset=4)
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * data[3]).reshape(shape).copy())


def read_images(folder: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels, uint8 of shape (count, 28, 28), and classes, int64 of shape (count,), of ``train`` or ``t10k``."""
    pixels = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
    return pixels, read_idx(folder / f"{part}-labels-idx1-ubyte.gz").long()


def shard(count: int, *, rank: int, size: int, seed: int, epoch: int) -> torch.Tensor:
    """This rank's share of `count` examples in this epoch's order: every example is in exactly one share."""
    order = np.random.default_rng((seed, epoch)).permutation(count)
    return torch.from_numpy(order[rank::size].copy())


def scaled_learning_rate(alone: float, size: int, position: float, warmup: float) -> float:
    """Learning rate at `position` (in epochs): from `alone` to `alone` × `size` over `warmup` epochs."""
    done = 1.0 if warmup <= 0 else min(1.0, position / warmup)
    return alone * (1 + (size - 1) * done)


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, CLASSES),
    )  # fmt: skip


def summed(value: float) -> float:
    """The sum of all ranks' values; every rank must call it at the same step."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


class Stop:
    """Becomes true on SIGTERM; `agreed` tells all ranks alike, so that they stop at the same step."""

    def __init__(self) -> None:
        self._told = False
        signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, _number: int, _frame: object) -> None:
        self._told = True

    def agreed(self) -> bool:
        """Whether any rank was told."""
        return summed(float(self._told)) > 0


class Trainer:
    """The network, its optimizer and how far training has come, the same on every rank."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments, self.device = arguments, device
        torch.manual_seed(arguments.seed)
        self.network = small_network().to(device, memory_format=layout(device))
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=arguments.learning_rate)
        self.epoch, self.seen, self.steps = 0, 0, 0  # `seen`: images of this epoch, by all ranks together
        self.checkpoint = arguments.outputs / "last.pt" if arguments.outputs else None
        self.loss = nn.CrossEntropyLoss()

    def resume(self) -> None:
        """Load the last checkpoint, if there is one: every rank finds it. DDP then sends rank 0's state to all."""
        if self.checkpoint and self.checkpoint.exists():
            saved = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
            self.network.load_state_dict(saved["network"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.epoch, self.seen, self.steps = saved["epoch"], saved["seen"], saved["steps"]
            if dist.get_rank() == 0:
                say(f"resuming from {self.checkpoint}: epoch {self.epoch + 1}, {self.seen} images into it")
        self.parallel = DistributedDataParallel(self.network)

    def save(self) -> None:
        """Write a checkpoint, whole or not at all; only rank 0 does, and only where there is a folder for it."""
        if self.checkpoint and dist.get_rank() == 0:
            state = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
            new = self.checkpoint.with_suffix(".new")
            torch.save({**state, "epoch": self.epoch, "seen": self.seen, "steps": self.steps}, new)
            new.replace(self.checkpoint)
            if gpurun:
                gpurun.checkpointed(self.steps)

    def step(self, pixels: torch.Tensor, labels: torch.Tensor) -> float:
        """One optimizer step on this rank's batch with the gradients of all; returns this rank's loss."""
        self.optimizer.zero_grad()
        with computing(self.device):
            loss = self.loss(self.parallel(scaled(pixels, self.device)), labels.to(self.device))
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run_epoch(self, pixels: torch.Tensor, labels: torch.Tensor, stop: Stop) -> bool:
        """Train the rest of the current epoch. False if a rank was told to stop before it ended."""
        chosen, size = self.arguments, dist.get_world_size()
        mine = shard(len(labels), rank=dist.get_rank(), size=size, seed=chosen.seed, epoch=self.epoch)
        steps = len(labels) // (chosen.batch * size)
        first = self.seen // (chosen.batch * size)
        losses, started = [], time.monotonic()
        for number in range(first, steps):
            if number % AGREE_EVERY == 0 and stop.agreed():
                return False
            rate = scaled_learning_rate(chosen.learning_rate, size, self.epoch + number / steps, chosen.warmup)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            batch = mine[number * chosen.batch : (number + 1) * chosen.batch]
            losses.append(self.step(pixels[batch], labels[batch]))
            self.seen, self.steps = (number + 1) * chosen.batch * size, self.steps + 1
            if gpurun:
                gpurun.progress(self.epoch * steps + number + 1, of=chosen.epochs * steps, loss=losses[-1])
        self.epoch, self.seen = self.epoch + 1, 0
        rate = len(losses) * chosen.batch / (time.monotonic() - started)
        say(f"epoch {self.epoch}/{chosen.epochs}: loss {np.mean(losses):.4f}, {rate:.0f} images/s on this rank")
        return True

    @torch.no_grad()
    def accuracy(self, pixels: torch.Tensor, labels: torch.Tensor) -> float:
        """Share of images that the network classifies right, each rank judging its own part."""
        right = 0
        for start in range(dist.get_rank() * 500, len(labels), dist.get_world_size() * 500):
            part = slice(start, start + 500)
            with computing(self.device):
                scores = self.network(scaled(pixels[part], self.device))
            right += int((scores.argmax(1).cpu() == labels[part]).sum())
        return summed(right) / len(labels)

    def same_on_all_ranks(self) -> bool:
        """Whether synchronous training kept every rank's network the same, up to the rounding of sums."""
        mine = torch.stack([value.double().sum().cpu() for value in self.network.parameters()])
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        return all(torch.allclose(each, everyone[0], rtol=1e-4, atol=1e-4) for each in everyone)


def computing(device: torch.device) -> torch.autocast:
    """On GPUs with bf16, layers compute in it; weights, gradients and checkpoints stay fp32. A CPU computes in fp32."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=has_bf16)


def layout(device: torch.device) -> torch.memory_format:
    """How images lie in memory: tensor cores want channels last."""
    return torch.channels_last if device.type == "cuda" else torch.contiguous_format


def scaled(pixels: torch.Tensor, device: torch.device) -> torch.Tensor:
    return (pixels.to(device).float().unsqueeze(1) / 255).contiguous(memory_format=layout(device))


def own_device(threads: int) -> torch.device:
    """One GPU a rank; without GPUs a fixed number of CPU threads, so that ranks on a host don't fight."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(threads)
    return torch.device("cpu")


def say(text: str) -> None:
    print(text + "\n", end="", flush=True)


def main() -> int:
    arguments = parse_arguments()
    device = own_device(arguments.threads)
    # Gloo beside NCCL: what ranks agree on is not on a GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    stop = Stop()
    say(f"rank {dist.get_rank()} of {dist.get_world_size()} on {socket.gethostname()}, {device}")
    pixels, labels = (each[: arguments.images] for each in read_images(arguments.data, "train"))
    trainer = Trainer(arguments, device)
    trainer.resume()
    started = time.monotonic()
    while trainer.epoch < arguments.epochs:
        finished = trainer.run_epoch(pixels, labels, stop)
        trainer.save()
        if not finished:
            say(f"told to stop after {trainer.seen} images of epoch {trainer.epoch + 1}")
            dist.barrier()  # who leaves first ends the others, and rank 0 has to have saved by then
            return STOPPED
    accuracy = trainer.accuracy(*read_images(arguments.data, "t10k"))
    same = trainer.same_on_all_ranks()
    if dist.get_rank() == 0:
        say(f"trained for {time.monotonic() - started:.1f} s, test accuracy {accuracy:.4f}")
        if accuracy < arguments.accuracy:
            say(f"that is less than {arguments.accuracy}")
        if not same:
            say("the ranks' networks differ: gradients were not averaged")
    dist.destroy_process_group()
    return 0 if same and accuracy >= arguments.accuracy else 1


if __name__ == "__main__":
    sys.exit(main())
