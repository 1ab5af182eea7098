"""Fit a line with Horovod's elastic mode: ranks may come and go while it runs.

What must survive is in the `state`: all ranks have it in memory as it was at the last `commit`, and ranks that join get
it from rank 0. Rank 0 also writes it to ``$GPURUN_OUTPUTS`` now and then, for the case that too few ranks are left.

A Keras model belongs into `hvd.elastic.TensorFlowKerasState`. `TensorFlowState` is to be avoided with TensorFlow 2: its
constructor broadcasts, and a rank that joins waits there for ranks that are elsewhere (seen with Horovod 0.28.1).
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from pathlib import Path

import gpurun_runtime as gpurun
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.elastic import ObjectState

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


def load() -> dict:
    """Step and line of the last checkpoint, or of the beginning."""
    return json.loads(checkpoint().read_text()) if checkpoint().exists() else {"step": 0, "line": [0.0, 0.0]}


def save(state: ObjectState) -> None:
    arriving = checkpoint().with_suffix(".arriving")
    arriving.write_text(json.dumps({"step": state.step, "line": state.line}))
    arriving.replace(checkpoint())
    gpurun.checkpointed(state.step)


def gradient(at: list[float], rng: np.random.Generator) -> tf.Tensor:
    line = tf.constant(at)
    x = tf.constant(rng.uniform(-1, 1, BATCH), tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(line)
        loss = tf.reduce_mean((line[0] * x + line[1] - (SLOPE * x + OFFSET)) ** 2)
    return tape.gradient(loss, line)


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    state = ObjectState(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **load())

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        print(f"{socket.gethostname()} is rank {hvd.rank()} of {hvd.size()} at step {state.step}", flush=True)
        while state.step < arguments.steps:
            rng = np.random.default_rng((state.step, hvd.rank()))
            step = LEARNING_RATE * hvd.allreduce(gradient(state.line, rng), name="gradient")
            state.line = (state.line - step).numpy().tolist()
            state.step += 1
            if hvd.rank() == 0:
                print(f"step {state.step} with {hvd.size()} ranks", flush=True)
                if state.step % CHECKPOINT_EVERY == 0:
                    save(state)
            gpurun.progress(state.step, of=arguments.steps)
            time.sleep(arguments.pause)
            state.commit()

    train(state)
    error = max(abs(state.line[0] - SLOPE), abs(state.line[1] - OFFSET))
    print(f"rank {hvd.rank()}: off by {error:.1e}", flush=True)
    raise SystemExit(error > 1e-2)


if __name__ == "__main__":
    main()
