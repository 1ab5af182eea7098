"""Train on Fashion-MNIST with compressed gradients, and say how many bytes they took and how good the network is.

``none``: float32, ring allreduce. ``fp16``: PyTorch's own hook. ``top-k``: `compression.TopK`. The bytes are those of
the network interface of rank 0's host, from its first step to its last; what else the host sends counts, too.

Exit codes: 0 trained and accurate enough; 1 not accurate enough.
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from compression import TopK, top_k_hook
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

try:
    import gpurun_runtime as gpurun  # in the container of a gpurun job; the script runs without it, too
except ImportError:
    gpurun = None

MOMENTUM = 0.9


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--compress", choices=("none", "fp16", "top-k"), default="none")
    parser.add_argument("--density", type=float, default=0.003, help="of top-k: the share of values that is sent")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=60_000, help="train on the first so many")
    parser.add_argument("--batch", type=int, default=64, help="images per rank and step")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of all ranks together")
    parser.add_argument("--accuracy", type=float, default=0.83, help="exit 1 below this test accuracy")
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
    """Pixels, float32 of shape (count, 1, 28, 28) from 0 to 1, and classes, int64, of ``train`` or ``t10k``."""
    pixels = read_idx(folder / f"{part}-images-idx3-ubyte.gz").unsqueeze(1).float() / 255
    return pixels, read_idx(folder / f"{part}-labels-idx1-ubyte.gz").long()


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def sent_bytes() -> int:
    """What the fabric's interface of this host has sent since it came up; 0 if it is not known."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME", "")
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    return 0


def computing(device: torch.device) -> torch.autocast:
    """On GPUs with bf16, layers compute in it; weights, gradients and checkpoints stay fp32. A CPU computes in fp32."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=has_bf16)


def layout(device: torch.device) -> torch.memory_format:
    """How images lie in memory: tensor cores want channels last."""
    return torch.channels_last if device.type == "cuda" else torch.contiguous_format


def own_device() -> torch.device:
    """One GPU a rank; without GPUs one CPU thread, so that ranks on a host don't fight."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(1)
    return torch.device("cpu")


def train(arguments: argparse.Namespace, device: torch.device) -> tuple[nn.Module, int]:
    """The trained network, and the bytes that this host has sent meanwhile."""
    torch.manual_seed(arguments.seed)
    alone = small_network().to(device, memory_format=layout(device))
    network = DistributedDataParallel(alone, bucket_cap_mb=64)
    momentum = MOMENTUM
    if arguments.compress == "fp16":
        network.register_comm_hook(None, fp16_compress_hook)
    elif arguments.compress == "top-k":
        network.register_comm_hook(TopK(arguments.density, MOMENTUM), top_k_hook)
        momentum = 0.0  # the hook applies it
    optimizer = torch.optim.SGD(network.parameters(), lr=arguments.learning_rate, momentum=momentum)
    pixels, labels = (each[: arguments.images] for each in read_images(arguments.data, "train"))
    loss_of, rank, size = nn.CrossEntropyLoss(), dist.get_rank(), dist.get_world_size()
    steps = len(labels) // (arguments.batch * size)
    before = sent_bytes()
    for epoch in range(arguments.epochs):
        order = np.random.default_rng((arguments.seed, epoch)).permutation(len(labels))
        mine, began = torch.from_numpy(order[rank::size].copy()), time.monotonic()
        for number in range(steps):
            batch = mine[number * arguments.batch : (number + 1) * arguments.batch]
            optimizer.zero_grad()
            images = pixels[batch].to(device, memory_format=layout(device))
            with computing(device):
                loss = loss_of(network(images), labels[batch].to(device))
            loss.backward()
            optimizer.step()
            if gpurun:
                gpurun.progress(epoch * steps + number + 1, of=arguments.epochs * steps, loss=loss.item())
        if rank == 0:
            rate = steps * arguments.batch * size / (time.monotonic() - began)
            print(f"epoch {epoch + 1}/{arguments.epochs}: loss {loss.item():.4f}, {rate:.0f} images/s", flush=True)
    return network.module, sent_bytes() - before


@torch.no_grad()
def accuracy_of(network: nn.Module, pixels: torch.Tensor, labels: torch.Tensor, device: torch.device) -> float:
    """The share of images that the network classifies right."""
    right = []
    for some, truth in zip(pixels.split(500), labels.split(500), strict=True):
        with computing(device):
            scores = network(some.to(device, memory_format=layout(device)))
        right.append(scores.argmax(1).cpu() == truth)
    return float(torch.cat(right).float().mean())


def main() -> int:
    arguments = parse_arguments()
    device = own_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    network, sent = train(arguments, device)
    accuracy = accuracy_of(network, *read_images(arguments.data, "t10k"), device)
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{arguments.compress}: {sent} bytes sent by this host, test accuracy {accuracy:.4f}", flush=True)
    dist.destroy_process_group()
    return 0 if accuracy >= arguments.accuracy else 1


if __name__ == "__main__":
    sys.exit(main())
