"""TensorFlow and Horovod: every rank computes, and gradients are averaged in a ring."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import choices
import flops
import measures
import models
import tf_network  # first: it sets what TensorFlow reads when it is imported

import horovod  # isort: skip
import horovod.tensorflow as hvd  # isort: skip
import tensorflow as tf  # isort: skip

ALONE_STEPS = 5
TRACED_STEPS = 3


class Rank:
    """One rank's network and batch."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.alone = tf_network.Alone(arguments)
        self.net, self.batch = self.alone.net, self.alone.batch
        self.gradient_bytes = 0
        hvd.broadcast_variables(self.net.trained, root_rank=0)

    @tf.function
    def step(self) -> None:
        found = tf_network.gradients(self.net, *self.batch, hvd.DistributedGradientTape)
        self.gradient_bytes = tf_network.gradient_bytes(found)  # when it is traced
        tf_network.apply(self.net, found)

    def exchange_s(self) -> float | None:
        """Seconds of exchange per step, from Horovod's timeline; only rank 0's has one."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "timeline.json"
            hvd.start_timeline(str(file))
            for _ in range(TRACED_STEPS):
                self.step()
            hvd.stop_timeline()
            hvd.allreduce(tf.zeros(1), name="traced")
            if hvd.rank() != 0 or not file.exists():
                return None
            return measures.busy_s(measures.timeline_s(file.read_text())) / TRACED_STEPS


def use_own_device(threads: int) -> None:
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
        tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], enable=True)
    else:
        tf_network.use_threads(threads)


def settled(arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments with all choices made, the same on every rank."""
    found = choices.settle(arguments, tf_network.card())
    tf_network.use(found)
    if found.batch is None:
        largest = models.LARGEST_BATCH.get(found.model, 256)
        found.batch = -_most(-choices.fitting(largest, lambda batch: tf_network.fits(found, batch)))
    return found


def _most(count: int) -> int:
    return int(hvd.allreduce(tf.constant(count), op=hvd.Max, name="most"))


def run(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")  # a timeline may begin and end while ranks train
    hvd.init()
    use_own_device(arguments.threads)
    arguments = settled(arguments)
    rank = Rank(arguments)
    steps = measures.Steps(arguments)
    steps.run(rank.step, _most)
    compute_s = measures.median_s(rank.alone.step, ALONE_STEPS)  # behind the others: a GPU's first steps are slower
    has_timeline = os.environ["HOROVOD_TIMELINE"] == "DYNAMIC"  # else a person wants one of the whole run
    exchange_s = 0.0 if hvd.size() == 1 else rank.exchange_s() if has_timeline else None
    sent = steps.sent / steps.count if hvd.local_rank() == 0 else None
    size = rank.gradient_bytes
    measures.tell(
        steps.last, step_s=steps.step_s, compute_s=compute_s, exchange_s=exchange_s,
        fabric_bytes=sent, batch=steps.items, gradient_bytes=size, **measures.way_of_training(arguments),
    )  # fmt: skip
    rates = hvd.allgather(tf.constant([steps.rate]), name="rates").numpy()
    name = card.name if (card := tf_network.card()) else ""
    measures.write(measures.outputs_folder(), str(hvd.rank()), {
        "size": hvd.size(), "way": "horovod", **measures.settings(arguments),
        "gradient_bytes": size, f"{steps.unit}_per_s": steps.rate, f"{steps.unit}_per_s_all": float(sum(rates)),
        **flops.figures(arguments.model, arguments.sequence, arguments.precision, steps.rate, name),
        "step_s": steps.step_s, "step_s_spread": measures.spread(steps.times_s), "compute_s": compute_s,
        "exchange_s": exchange_s, "fabric_bytes": sent, "steps_s": steps.times_s,
        "versions": {"tensorflow": tf.__version__, "horovod": horovod.__version__},
    })  # fmt: skip
    return 0
