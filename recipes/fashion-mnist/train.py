"""Train a small convolutional network on Fashion-MNIST with Horovod, and check how well it does.

Each rank trains on its own part of the images, gradients are averaged, the learning rate grows with the number of
ranks after a warm-up (Goyal et al. 2017, https://arxiv.org/abs/1706.02677, as in Horovod's own examples). Rank 0
writes checkpoints to ``$GPURUN_OUTPUTS``; a later start with the same folder continues from the last one, also with
another number of ranks. A sweep's parameters ``lr`` and ``dropout`` are defaults of the flags; the script reports
``accuracy``.

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
from dataclasses import dataclass
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

try:
    import gpurun_runtime as gpurun  # in the container of a gpurun job; the script runs without it, too
except ImportError:
    gpurun = None

PARAMETERS = gpurun.parameters() if gpurun else {}  # of a sweep's trial

CLASSES = 10
SIDE = 28  # pixels
STOPPED = 128 + signal.SIGTERM
AGREE_EVERY = 10  # steps between asking all ranks whether one of them was told to stop


@dataclass(frozen=True)
class Images:
    """Grey images, uint8 of shape (count, 28, 28), and their classes, uint8 of shape (count,)."""

    pixels: np.ndarray
    labels: np.ndarray


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--outputs", type=Path, default=os.environ.get("GPURUN_OUTPUTS") or None)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="images per rank and step")
    parser.add_argument("--learning-rate", type=float, default=PARAMETERS.get("lr", 0.001), help="of one rank alone")
    parser.add_argument("--dropout", type=float, default=PARAMETERS.get("dropout", 0.0))
    parser.add_argument("--warmup", type=float, default=1.0, help="epochs until the learning rate is scaled up")
    least = 0.0 if PARAMETERS else 0.85  # a sweep compares all trials, the worse ones too
    parser.add_argument("--accuracy", type=float, default=least, help="exit 1 below this test accuracy")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads a rank")
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def read_idx(file: Path) -> np.ndarray:
    """An array of unsigned bytes in the IDX format (http://yann.lecun.com/exdb/mnist), gzipped."""
    data = gzip.decompress(file.read_bytes())
    if data[:3] != b"\0\0\x08":
        raise SystemExit(f"{file}: not an IDX file of unsigned bytes")
    shape = np.frombuffer(data, dtype=">i4", count=data[3], offset=4)
    return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def read_images(folder: Path, part: str) -> Images:
    """The ``train`` (60,000 images) or ``t10k`` (10,000 images) half of the data set."""
    return Images(read_idx(folder / f"{part}-images-idx3-ubyte.gz"), read_idx(folder / f"{part}-labels-idx1-ubyte.gz"))


def shard(count: int, *, rank: int, size: int, seed: int, epoch: int) -> np.ndarray:
    """This rank's share of `count` examples in this epoch's order: every example is in exactly one share."""
    return np.random.default_rng((seed, epoch)).permutation(count)[rank::size]


def scaled_learning_rate(alone: float, size: int, position: float, warmup: float) -> float:
    """Learning rate at `position` (in epochs): from `alone` to `alone` × `size` over `warmup` epochs."""
    done = 1.0 if warmup <= 0 else min(1.0, position / warmup)
    return alone * (1 + (size - 1) * done)


def small_network(seed: int, dropout: float) -> tf.keras.Model:
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(seed)
    return tf.keras.Sequential([
        layers.Input((SIDE, SIDE, 1)),
        layers.Rescaling(1 / 255),
        layers.Conv2D(16, 3, activation="relu", padding="same"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu", padding="same"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        *([layers.Dropout(dropout)] if dropout else []),
        layers.Dense(CLASSES),
    ])  # fmt: skip


class Stop:
    """Becomes true on SIGTERM; `agreed` tells all ranks alike, so that they stop at the same step."""

    def __init__(self) -> None:
        self._told = False
        signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, _number: int, _frame: object) -> None:
        self._told = True

    def agreed(self) -> bool:
        """Whether any rank was told; every rank must ask at the same step."""
        return float(hvd.allreduce(tf.constant(float(self._told)), op=hvd.Sum, name="told_to_stop")) > 0


class Trainer:
    """The network, its optimizer and how far training has come, the same on every rank."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.model = small_network(arguments.seed, arguments.dropout)
        # Horovod 0.28 wraps Keras's earlier optimizer interface.
        adam = tf.keras.optimizers.legacy.Adam(learning_rate=arguments.learning_rate)
        self.optimizer = hvd.DistributedOptimizer(adam)
        self.optimizer._create_all_weights(self.model.trainable_variables)
        self.loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.epoch = tf.Variable(0, dtype=tf.int64)
        self.seen = tf.Variable(0, dtype=tf.int64)  # images of this epoch, by all ranks together
        saved = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer, epoch=self.epoch, seen=self.seen)
        self.checkpoints = None
        if arguments.outputs and hvd.rank() == 0:
            self.checkpoints = tf.train.CheckpointManager(saved, str(arguments.outputs), max_to_keep=2)

    def resume(self) -> None:
        """Load the last checkpoint on rank 0, if there is one, and give every rank the same state."""
        if self.checkpoints and (found := self.checkpoints.restore_or_initialize()):
            say(f"resuming from {found}: epoch {int(self.epoch) + 1}, {int(self.seen)} images into it")
        hvd.broadcast_variables(
            [*self.model.variables, *self.optimizer.variables(), self.epoch, self.seen], root_rank=0
        )

    def save(self) -> None:
        """Write a checkpoint; only rank 0 does, and only where there is a folder for it."""
        if self.checkpoints:
            self.checkpoints.save()
            if gpurun:
                gpurun.checkpointed(int(self.optimizer.iterations))

    @tf.function(reduce_retracing=True)
    def step(self, pixels: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """One optimizer step on this rank's batch with the gradients of all; returns this rank's loss."""
        with tf.GradientTape() as tape:
            loss = self.loss(labels, self.model(tf.cast(pixels, tf.float32)[..., None], training=True))
        # Not apply_gradients: Horovod averages where the optimizer computes gradients, not where it applies them.
        self.optimizer.minimize(loss, self.model.trainable_variables, tape=tape)
        return loss

    def run_epoch(self, images: Images, stop: Stop) -> bool:
        """Train the rest of the current epoch. False if a rank was told to stop before it ended."""
        chosen, epoch, size = self.arguments, int(self.epoch), hvd.size()
        mine = shard(len(images.labels), rank=hvd.rank(), size=size, seed=chosen.seed, epoch=epoch)
        steps = len(images.labels) // (chosen.batch * size)
        first = int(self.seen) // (chosen.batch * size)
        losses, started = [], time.monotonic()
        for number in range(first, steps):
            if number % AGREE_EVERY == 0 and stop.agreed():
                return False
            rate = scaled_learning_rate(chosen.learning_rate, size, epoch + number / steps, chosen.warmup)
            self.optimizer.learning_rate.assign(rate)
            batch = mine[number * chosen.batch : (number + 1) * chosen.batch]
            losses.append(float(self.step(images.pixels[batch], images.labels[batch])))
            self.seen.assign((number + 1) * chosen.batch * size)
            if gpurun:
                gpurun.progress(epoch * steps + number + 1, of=chosen.epochs * steps, loss=losses[-1])
        self.epoch.assign(epoch + 1)
        self.seen.assign(0)
        rate = len(losses) * chosen.batch / (time.monotonic() - started)
        say(f"epoch {epoch + 1}/{chosen.epochs}: loss {np.mean(losses):.4f}, {rate:.0f} images/s on this rank")
        return True

    def accuracy(self, images: Images) -> float:
        """Share of images that the network classifies right, each rank judging its own part."""
        right = 0
        for start in range(hvd.rank() * 500, len(images.labels), hvd.size() * 500):
            part = slice(start, start + 500)
            scores = self.model(tf.cast(images.pixels[part], tf.float32)[..., None], training=False)
            right += int(np.sum(np.argmax(scores, axis=1) == images.labels[part]))
        return float(hvd.allreduce(tf.constant(float(right)), op=hvd.Sum, name="right")) / len(images.labels)

    def same_on_all_ranks(self) -> bool:
        """Whether synchronous training kept every rank's network the same, up to the rounding of sums."""
        sums = tf.stack([tf.reduce_sum(tf.cast(value, tf.float64)) for value in self.model.variables])
        everyone = hvd.allgather(sums[None], name="sums").numpy()
        return bool(np.allclose(everyone, everyone[0], rtol=1e-4, atol=1e-4, equal_nan=True))


def use_own_device(threads: int) -> str:
    """One GPU a rank; without GPUs a fixed number of CPU threads, so that ranks on a host don't fight."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
        tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], enable=True)
        return gpus[hvd.local_rank()].name
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return f"{threads} CPU thread{'s' * (threads != 1)}"


def say(text: str) -> None:
    # The line and its end in one write: the launcher puts the rank before whatever it reads at a time.
    print(text + "\n", end="", flush=True)


def main() -> int:
    arguments = parse_arguments()
    hvd.init()
    stop = Stop()
    device = use_own_device(arguments.threads)
    say(f"rank {hvd.rank()} of {hvd.size()}, local rank {hvd.local_rank()} on {socket.gethostname()}, {device}")
    images = read_images(arguments.data, "train")
    trainer = Trainer(arguments)
    trainer.resume()
    started = time.monotonic()
    while int(trainer.epoch) < arguments.epochs:
        finished = trainer.run_epoch(images, stop)
        trainer.save()
        if not finished:
            say(f"told to stop after {int(trainer.seen)} images of epoch {int(trainer.epoch) + 1}")
            # A barrier: who leaves first makes the launcher end the others, and rank 0 has to have saved by then.
            hvd.allreduce(tf.zeros(1), name="saved")
            return STOPPED
    accuracy = trainer.accuracy(read_images(arguments.data, "t10k"))
    if gpurun:
        gpurun.report(int(trainer.optimizer.iterations), accuracy=accuracy)
    if not trainer.same_on_all_ranks():
        say("the ranks' networks differ: gradients were not averaged")
        return 1
    if hvd.rank() == 0:
        say(f"trained for {time.monotonic() - started:.1f} s, test accuracy {accuracy:.4f}")
        if accuracy < arguments.accuracy:
            say(f"that is less than {arguments.accuracy}")
    return 0 if accuracy >= arguments.accuracy else 1


if __name__ == "__main__":
    sys.exit(main())
