"""Train a small convolutional network on Fashion-MNIST with PyTorch on Horovod, and check how well it does.

Each rank has its own part of the images, ``hvd.DistributedOptimizer`` averages the gradients, the learning rate grows
with the number of ranks after a warm-up (Goyal et al. 2017, https://arxiv.org/abs/1706.02677). Rank 0 writes a
checkpoint to ``$GPURUN_OUTPUTS`` after each epoch; a later start with the same folder continues from it, also with
another number of ranks.

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

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn

try:
    import gpurun_runtime as gpurun  # in the container of a gpurun job; the script runs without it, too
except ImportError:
    gpurun = None

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


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def summed(value: float, name: str) -> float:
    """The sum of all ranks' values; every rank must call it at the same step."""
    return float(hvd.allreduce(torch.tensor(value, dtype=torch.float64), op=hvd.Sum, name=name))


def computing(device: torch.device) -> torch.autocast:
    """On GPUs with bf16, layers compute in it; weights, gradients and checkpoints stay fp32. A CPU computes in fp32."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=has_bf16)


def layout(device: torch.device) -> torch.memory_format:
    """How images lie in memory: tensor cores want channels last."""
    return torch.channels_last if device.type == "cuda" else torch.contiguous_format


def scaled(pixels: torch.Tensor, device: torch.device) -> torch.Tensor:
    return (pixels.to(device).float().unsqueeze(1) / 255).contiguous(memory_format=layout(device))


def own_device() -> torch.device:
    """One GPU a rank; without GPUs one CPU thread, so that ranks on a host don't fight."""
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank())
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(1)
    return torch.device("cpu")


class Training:
    """The network, its optimizer and how far training has come, the same on every rank."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments, self.device = arguments, device
        torch.manual_seed(arguments.seed)
        self.network = small_network().to(device, memory_format=layout(device))
        adam = torch.optim.Adam(self.network.parameters(), lr=arguments.learning_rate)
        self.optimizer = hvd.DistributedOptimizer(adam, named_parameters=self.network.named_parameters())
        self.epoch = 0
        self.checkpoint = arguments.outputs / "last.pt" if arguments.outputs else None
        self.is_told = False
        signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, _number: int, _frame: object) -> None:
        self.is_told = True

    def resume(self) -> None:
        """Load the last checkpoint, if there is one: rank 0 reads it and gives it to all."""
        saved = None
        if hvd.rank() == 0 and self.checkpoint and self.checkpoint.exists():
            saved = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        if saved := hvd.broadcast_object(saved, root_rank=0, name="saved"):
            self.network.load_state_dict(saved["network"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.epoch = saved["epoch"]
            if hvd.rank() == 0:
                say(f"resuming from {self.checkpoint}: epoch {self.epoch + 1}")

    def save(self) -> None:
        """Write a checkpoint, whole or not at all; only rank 0 does, and only where there is a folder for it."""
        if self.checkpoint and hvd.rank() == 0:
            state = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
            new = self.checkpoint.with_suffix(".new")
            torch.save({**state, "epoch": self.epoch}, new)
            new.replace(self.checkpoint)
            if gpurun:
                gpurun.checkpointed(self.epoch)

    def run_epoch(self, pixels: torch.Tensor, labels: torch.Tensor) -> bool:
        """Train one epoch. False if a rank was told to stop before it ended."""
        chosen, loss_of = self.arguments, nn.CrossEntropyLoss()
        order = np.random.default_rng((chosen.seed, self.epoch)).permutation(len(labels))
        mine = torch.from_numpy(order[hvd.rank() :: hvd.size()].copy())
        steps, started, losses = len(labels) // (chosen.batch * hvd.size()), time.monotonic(), []
        for number in range(steps):
            if number % AGREE_EVERY == 0 and summed(float(self.is_told), "told_to_stop"):
                return False
            done = 1.0 if chosen.warmup <= 0 else min(1.0, (self.epoch + number / steps) / chosen.warmup)
            for group in self.optimizer.param_groups:
                group["lr"] = chosen.learning_rate * (1 + (hvd.size() - 1) * done)
            batch = mine[number * chosen.batch : (number + 1) * chosen.batch]
            self.optimizer.zero_grad()
            with computing(self.device):
                loss = loss_of(self.network(scaled(pixels[batch], self.device)), labels[batch].to(self.device))
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
            if gpurun:
                gpurun.progress(self.epoch * steps + number + 1, of=chosen.epochs * steps, loss=losses[-1])
        self.epoch += 1
        rate = steps * chosen.batch / (time.monotonic() - started)
        say(f"epoch {self.epoch}/{chosen.epochs}: loss {np.mean(losses):.4f}, {rate:.0f} images/s on this rank")
        return True

    @torch.no_grad()
    def accuracy(self, pixels: torch.Tensor, labels: torch.Tensor) -> float:
        """Share of images that the network classifies right, each rank judging its own part."""
        right = 0
        for start in range(hvd.rank() * 500, len(labels), hvd.size() * 500):
            part = slice(start, start + 500)
            with computing(self.device):
                scores = self.network(scaled(pixels[part], self.device))
            right += int((scores.argmax(1).cpu() == labels[part]).sum())
        return summed(right, "right") / len(labels)

    def same_on_all_ranks(self) -> bool:
        """Whether averaging kept every rank's network the same."""
        sums = torch.stack([value.double().sum().cpu() for value in self.network.parameters()])
        everyone = hvd.allgather(sums[None], name="sums")
        return bool(torch.allclose(everyone, everyone[:1], rtol=1e-4, atol=1e-4))


def say(text: str) -> None:
    print(text + "\n", end="", flush=True)


def main() -> int:
    arguments = parse_arguments()
    hvd.init()
    device = own_device()
    say(f"rank {hvd.rank()} of {hvd.size()} on {socket.gethostname()}, {device}")
    pixels, labels = (each[: arguments.images] for each in read_images(arguments.data, "train"))
    training = Training(arguments, device)
    training.resume()
    while training.epoch < arguments.epochs:
        finished = training.run_epoch(pixels, labels)
        training.save()
        if not finished:
            say(f"told to stop in epoch {training.epoch + 1}")
            hvd.barrier()  # who leaves first ends the others, and rank 0 has to have saved by then
            return STOPPED
    accuracy = training.accuracy(*read_images(arguments.data, "t10k"))
    same = training.same_on_all_ranks()
    if hvd.rank() == 0:
        say(f"trained to test accuracy {accuracy:.4f}")
        if not same:
            say("the ranks' networks differ: gradients were not averaged")
    return 0 if same and accuracy >= arguments.accuracy else 1


if __name__ == "__main__":
    sys.exit(main())
