"""Train a small convolutional network on Fashion-MNIST with TensorFlow's parameter servers, and check it.

An ordinary script of ``ParameterServerStrategy``, the same for every task; ``TF_CONFIG`` says which one it is. The
chief hands out steps; workers take them as fast as they can, without waiting for each other; the servers hold the
variables. Workers and servers run until they are stopped. The chief writes checkpoints to ``$GPURUN_OUTPUTS``; a later
start with the same folder continues from the last one, also with other numbers of workers and servers.

Exit codes: 0 trained and accurate enough; 1 not accurate enough; 143 stopped by SIGTERM after a checkpoint.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

try:
    import gpurun_runtime as gpurun  # in the container of a gpurun job; the script runs without it, too
except ImportError:
    gpurun = None

CLASSES = 10
SIDE = 28  # pixels
STOPPED = 128 + signal.SIGTERM
TOLD_EVERY = 50  # steps between two words of progress, and two looks whether to stop
HERE = tf.train.CheckpointOptions(experimental_io_device="/job:chief/task:0")
"""The chief itself writes checkpoints. Else each server writes its part to its own host's disk."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--outputs", type=Path, default=os.environ.get("GPURUN_OUTPUTS") or None)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=60_000, help="train on the first so many")
    parser.add_argument("--batch", type=int, default=64, help="images per step")
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument("--accuracy", type=float, default=0.85, help="exit 1 below this test accuracy")
    return parser.parse_args()


def read_images(folder: Path, part: str) -> tf.data.Dataset:
    """Pixels, uint8 of shape (28, 28, 1), and class of each image of ``train`` or ``t10k``.

    The files have the IDX format (http://yann.lecun.com/exdb/mnist). A task that iterates reads them on its own host.
    """

    def records(kind: str, header: int, size: int) -> tf.data.Dataset:
        file = str(folder / f"{part}-{kind}-ubyte.gz")
        return tf.data.FixedLengthRecordDataset(file, size, header_bytes=header, compression_type="GZIP")

    pixels = records("images-idx3", 16, SIDE * SIDE).map(
        lambda r: tf.reshape(tf.io.decode_raw(r, tf.uint8), (SIDE, SIDE, 1))
    )
    labels = records("labels-idx1", 8, 1).map(lambda r: tf.io.decode_raw(r, tf.uint8)[0])
    return tf.data.Dataset.zip((pixels, labels))


def count_of(images: tf.data.Dataset) -> int:
    return int(images.reduce(np.int64(0), lambda count, _: count + 1))


def small_network() -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential([
        layers.Input((SIDE, SIDE, 1)),
        layers.Rescaling(1 / 255),
        layers.Conv2D(16, 3, activation="relu", padding="same"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu", padding="same"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(CLASSES),
    ])  # fmt: skip


class Stop:
    """Becomes true on SIGTERM."""

    def __init__(self) -> None:
        self.told = False
        signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, _number: int, _frame: object) -> None:
        self.told = True


class Trainer:
    """The network on the servers, and how far training has come; the chief has one."""

    def __init__(self, arguments: argparse.Namespace, resolver: tf.distribute.cluster_resolver.ClusterResolver) -> None:
        self.arguments = arguments
        self.steps = count_of(self._images()) // arguments.batch
        self.strategy = tf.distribute.ParameterServerStrategy(resolver)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        with self.strategy.scope():
            self.model = small_network()
            self.optimizer = tf.keras.optimizers.legacy.Adam(arguments.learning_rate)
            self.optimizer._create_all_weights(self.model.trainable_variables)
        self.done = tf.Variable(0, dtype=tf.int64)  # steps of all epochs
        self.at_once = 1  # steps to hand out; the first alone, see run_epoch
        self.batches = iter(self.coordinator.create_per_worker_dataset(self._batches))
        saved = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer, done=self.done)
        self.manager = None
        if arguments.outputs:
            self.manager = tf.train.CheckpointManager(saved, str(arguments.outputs), max_to_keep=2)

    def _images(self) -> tf.data.Dataset:
        return read_images(self.arguments.data, "train").take(self.arguments.images)

    def _batches(self) -> tf.data.Dataset:
        """A worker's batches: every worker shuffles all images in an order of its own."""
        return self._images().cache().shuffle(60_000).repeat().batch(self.arguments.batch).prefetch(2)

    @property
    def epoch(self) -> int:
        """How many epochs are done."""
        return int(self.done) // self.steps

    def resume(self) -> None:
        """Load the last checkpoint, if there is one."""
        if self.manager and (found := self.manager.latest_checkpoint):
            self.manager.checkpoint.restore(found, HERE).assert_existing_objects_matched()
            say(f"resuming from {found}: epoch {self.epoch + 1}, {int(self.done) % self.steps} steps into it")

    def save(self) -> None:
        """Write a checkpoint, where there is a folder for it."""
        if self.manager:
            self.manager.save(options=HERE)
            if gpurun:
                gpurun.checkpointed(int(self.done))

    @tf.function
    def step(self, batches: tf.data.Iterator) -> tf.Tensor:
        """One step of one worker, with the variables that the servers have now; returns its loss."""

        def on_device(pixels: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                scores = self.model(tf.cast(pixels, tf.float32), training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels, tf.int32), scores)
                loss = tf.reduce_mean(losses)
            variables = self.model.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        return self.strategy.run(on_device, args=next(batches))

    def run_epoch(self, stop: Stop) -> bool:
        """Train the rest of the current epoch, and save. False if the chief was told to stop before it ended.

        The very first step is taken alone: in 1 of 50 starts, TensorFlow 2.15 crashed in ``tf.identity`` when the first
        results of all workers came home in the same moment.
        """
        until, started, first, losses = (self.epoch + 1) * self.steps, time.monotonic(), int(self.done), []
        while int(self.done) < until:
            if stop.told:
                return False
            count = min(self.at_once, until - int(self.done))
            self.at_once = TOLD_EVERY
            results = [self.coordinator.schedule(self.step, args=(self.batches,)) for _ in range(count)]
            self.coordinator.join()
            losses += self.coordinator.fetch(results)
            self.done.assign_add(count)
            if gpurun:
                gpurun.progress(int(self.done), of=self.arguments.epochs * self.steps, loss=float(losses[-1]))
        rate = (until - first) * self.arguments.batch / (time.monotonic() - started)
        self.save()
        say(f"epoch {self.epoch}/{self.arguments.epochs}: loss {np.mean(losses):.4f}, {rate:.0f} images/s")
        return True

    def accuracy(self) -> float:
        """Share of test images that the network classifies right, judged by the chief alone."""
        network = small_network()
        network.set_weights([variable.numpy() for variable in self.model.variables])
        images = read_images(self.arguments.data, "t10k").batch(500)
        found = [np.argmax(network(tf.cast(pixels, tf.float32)), axis=1) == labels for pixels, labels in images]
        return float(np.mean(np.concatenate(found)))


def say(text: str) -> None:
    print(text + "\n", end="", flush=True)


def main() -> int:
    arguments = parse_arguments()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    say(f"{resolver.task_type} {resolver.task_id} on {socket.gethostname()}, {tf.config.list_physical_devices('GPU')}")
    if resolver.task_type in ("worker", "ps"):
        tf.distribute.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
        ).join()
    stop = Stop()
    trainer = Trainer(arguments, resolver)
    trainer.resume()
    started = time.monotonic()
    while trainer.epoch < arguments.epochs:
        if not trainer.run_epoch(stop):
            trainer.save()
            say(f"told to stop after {int(trainer.done)} steps")
            return STOPPED
    accuracy = trainer.accuracy()
    say(f"trained for {time.monotonic() - started:.1f} s, test accuracy {accuracy:.4f}")
    if accuracy < arguments.accuracy:
        say(f"that is less than {arguments.accuracy}")
    return 0 if accuracy >= arguments.accuracy else 1


if __name__ == "__main__":
    sys.exit(main())
