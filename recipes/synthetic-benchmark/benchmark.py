"""Measure how fast ranks train on synthetic images, and where the time goes.

One script for Horovod (TensorFlow), ``torchrun`` (PyTorch) and TensorFlow's parameter servers: how it was started
says which. Each rank reports images/s of each step, and writes ``rank-N.json`` into its outputs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys

import models


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=models.NAMES, default="tiny")
    parser.add_argument("--batch", type=int, help="images per rank and step; default 64, tiny 32")
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them, not measured")
    parser.add_argument("--slowdown", type=float, default=models.SLOWDOWN, help="of paced networks, over a P100")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads per rank, where there is no GPU")
    arguments = parser.parse_args(argv)
    arguments.batch = models.BATCH.get(arguments.model, 64) if arguments.batch is None else arguments.batch
    if arguments.steps < 2 or arguments.warmup < 1 or arguments.batch < 1 or arguments.slowdown <= 0:
        parser.error("--steps needs 2 or more, --warmup and --batch 1 or more, --slowdown more than 0")
    return arguments


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
