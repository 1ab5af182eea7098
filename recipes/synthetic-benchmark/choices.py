"""What a run trains with where nobody said so: precision, compiling, memory layout, batch. Needs no framework."""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import models

PRECISIONS = ("bf16", "fp16", "tf32", "fp32")
BF16_SINCE, FP16_SINCE = (8, 0), (7, 0)
"""The compute capabilities from which NVIDIA's tensor cores multiply in this precision: Ampere, Volta."""


@dataclass(frozen=True)
class Card:
    """A GPU: its name, such as ``NVIDIA H100 80GB HBM3``, and its compute capability."""

    name: str
    capability: tuple[int, int]


def settle(arguments: argparse.Namespace, card: Card | None, lacks: str = "") -> argparse.Namespace:
    """Return the arguments with a value for each choice.

    `batch` stays None on a GPU if nobody named one: `fitting` then finds the largest that the memory holds. Without
    a GPU, nothing differs from a plain program: fp32, contiguous images, not compiled.

    Args:
        lacks: what the image lacks to compile a network.

    Raises:
        SystemExit: the device cannot do what was asked for.
    """
    found = copy.copy(arguments)
    is_paced = found.model in models.PACED
    is_modern = card is not None and not found.as_2017 and not is_paced
    if found.precision is None:
        found.precision = _usual(card) if is_modern and card is not None else "fp32"
    _refuse(found.precision, card, is_paced)
    if found.compile is None:
        found.compile = is_modern and not lacks
        if is_modern and lacks:
            print(f"not compiled, so slower than it could be: the image has no {lacks}", file=sys.stderr)
    elif found.compile and lacks:
        raise SystemExit(f"--compile: the image has no {lacks}; add it, or leave --compile out")
    elif found.compile and is_paced:
        raise SystemExit(f"--compile: {found.model} waits instead of computing, so there is nothing to compile")
    found.channels_last = is_modern and found.model not in models.TRANSFORMERS
    if found.batch is None and not is_modern:
        found.batch = models.BATCH.get(found.model, 64)
    found.sequence = models.sequence(found.model, found.sequence)
    return found


def _usual(card: Card) -> str:
    return "bf16" if card.capability >= BF16_SINCE else "fp16" if card.capability >= FP16_SINCE else "fp32"


def _refuse(precision: str, card: Card | None, is_paced: bool) -> None:
    if is_paced and precision != "fp32":
        raise SystemExit(f"--precision {precision}: paced networks wait instead of computing; leave --precision out")
    if card is None and precision == "tf32":
        raise SystemExit("--precision tf32: only GPUs have TF32, from Ampere on; choose bf16 or fp32 on a CPU")
    if card is not None and precision in ("bf16", "tf32") and card.capability < BF16_SINCE:
        raise SystemExit(f"--precision {precision}: {card.name} has none, GPUs have it from Ampere on; choose fp16")


def fitting(largest: int, fits: Callable[[int], bool]) -> int:
    """Return the largest batch that fits: `largest`, or a half, a quarter … of it; 1 is not tried."""
    batch = largest
    while batch > 1 and not fits(batch):
        batch //= 2
    return batch


def steps_for(seconds: float, step_s: float) -> int:
    """Return how many steps take so many seconds, 2 or more."""
    return max(2, math.ceil(seconds / max(step_s, 1e-6)))
