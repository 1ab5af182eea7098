"""Measure how fast ranks train on synthetic images or tokens, and where the time goes.

One script for Horovod (TensorFlow), ``torchrun`` (PyTorch) and TensorFlow's parameter servers: how it was started
says which. Each rank reports images/s or tokens/s of each step, and writes ``rank-N.json`` into its outputs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys

import choices
import models


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=models.NAMES, default="tiny")
    parser.add_argument("--batch", type=int, help="images or sequences per rank and step; default: what a GPU holds")
    parser.add_argument("--sequence", type=int, help="tokens of a sequence, of transformers; default 1024, tiny 64")
    parser.add_argument("--precision", choices=choices.PRECISIONS, help="default bf16 where the GPU has it, CPUs fp32")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on GPUs")
    parser.add_argument("--as-2017", action="store_true", help="fp32, contiguous, not compiled, batches of 64")
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--seconds", type=float, help="measure about so long, however many steps that are")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them, not measured")
    parser.add_argument("--slowdown", type=float, default=models.SLOWDOWN, help="of paced networks, over a P100")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads per rank, where there is no GPU")
    arguments = parser.parse_args(argv)
    _refuse_senseless(parser, arguments)
    return arguments


def _refuse_senseless(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.steps < 2 or arguments.warmup < 1:
        parser.error("--steps needs 2 or more, --warmup 1 or more")
    for name in ("batch", "sequence", "seconds", "slowdown"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{name} needs more than 0")
    if arguments.sequence is not None and arguments.model not in models.TRANSFORMERS:
        parser.error(f"--sequence is for {', '.join(models.TRANSFORMERS)}; {arguments.model} trains on images")


def chosen(environ: dict[str, str]) -> str:
    """Which way of training the launcher has prepared."""
    if environ.get("TF_CONFIG"):
        if "ps" not in json.loads(environ["TF_CONFIG"]).get("cluster", {}):
            raise SystemExit("there are no parameter servers: start it with `roles: {ps: N}`, as ps.yaml does")
        return "servers"
    return "torch" if environ.get("MASTER_ADDR") and environ.get("WORLD_SIZE") else "horovod"


def main() -> int:
    arguments = parse_arguments()
    backend = importlib.import_module(f"by_{chosen(dict(os.environ))}")  # each needs another framework
    return backend.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
