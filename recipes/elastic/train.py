"""Fit a line with Horovod's elastic mode: ranks may come and go while it runs.

What must survive is in the `state`: all ranks have it in memory as it was at the last `commit`, and ranks that join get
it from rank 0. Rank 0 also writes it to ``$GPURUN_OUTPUTS`` now and then, for the case that too few ranks are left.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from pathlib import Path

import gpurun_runtime as gpurun
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

SLOPE, OFFSET = 3.0, -1.0
LEARNING_RATE = 0.1
BATCH = 64  # points per rank and step
CHECKPOINT_EVERY = 20  # steps


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds a step takes besides")
    return parser.parse_args()


def checkpoint() -> Path:
    return Path(gpurun.outputs()) / "checkpoint.json"


def load(line: tf.Variable) -> int:
    """The step of the last checkpoint, 0 without one; `line` becomes what it was then."""
    if not checkpoint().exists():
        return 0
    found = json.loads(checkpoint().read_text())
    line.assign(found["line"])
    return int(found["step"])


def save(state: hvd.elastic.TensorFlowState, line: tf.Variable) -> None:
    arriving = checkpoint().with_suffix(".arriving")
    arriving.write_text(json.dumps({"step": state.step, "line": line.numpy().tolist()}))
    os.replace(arriving, checkpoint())
    gpurun.checkpointed(state.step)


def gradient(line: tf.Variable, rng: np.random.Generator) -> tf.Tensor:
    x = tf.constant(rng.uniform(-1, 1, BATCH), tf.float32)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((line[0] * x + line[1] - (SLOPE * x + OFFSET)) ** 2)
    return tape.gradient(loss, line)


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    line = tf.Variable([0.0, 0.0])
    state = hvd.elastic.TensorFlowState(variables=[line], step=load(line) if hvd.rank() == 0 else 0)

    @hvd.elastic.run
    def train(state: hvd.elastic.TensorFlowState) -> None:
        print(f"{socket.gethostname()} is rank {hvd.rank()} of {hvd.size()} at step {state.step}", flush=True)
        hvd.broadcast_variables([line], root_rank=0)
        while state.step < arguments.steps:
            rng = np.random.default_rng((state.step, hvd.rank()))
            line.assign_sub(LEARNING_RATE * hvd.allreduce(gradient(line, rng), name="gradient"))
            state.step += 1
            if hvd.rank() == 0:
                print(f"step {state.step} with {hvd.size()} ranks", flush=True)
                if state.step % CHECKPOINT_EVERY == 0:
                    save(state, line)
            gpurun.progress(state.step, of=arguments.steps)
            time.sleep(arguments.pause)
            state.commit()

    train(state)
    error = float(tf.reduce_max(tf.abs(line - [SLOPE, OFFSET])))
    print(f"rank {hvd.rank()}: off by {error:.1e}", flush=True)
    raise SystemExit(error > 1e-2)


if __name__ == "__main__":
    main()
