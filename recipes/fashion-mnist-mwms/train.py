"""Train a small convolutional network on Fashion-MNIST with TensorFlow's MultiWorkerMirroredStrategy, and check it.

An ordinary Keras script: ``TF_CONFIG`` says which worker this is and where the others are. Each worker trains on its
own part of every batch, gradients are averaged. All workers take part in writing a checkpoint; worker 0's goes to
``$GPURUN_OUTPUTS`` after each epoch. A later start with the same folder continues from it, also with another number of
workers.

Exit codes: 0 trained and accurate enough; 1 not accurate enough.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

try:
    import gpurun_runtime as gpurun  # in the container of a gpurun job; the script runs without it, too
except ImportError:
    gpurun = None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--outputs", type=Path, default=os.environ.get("GPURUN_OUTPUTS") or None)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=60_000, help="train on the first so many")
    parser.add_argument("--batch", type=int, default=64, help="images per worker and step")
    parser.add_argument("--learning-rate", type=float, default=0.001, help="of one worker alone")
    parser.add_argument("--accuracy", type=float, default=0.85, help="exit 1 below this test accuracy")
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def read_idx(file: Path) -> np.ndarray:
    """An array of unsigned bytes in the IDX format (http://yann.lecun.com/exdb/mnist), gzipped."""
    data = gzip.decompress(file.read_bytes())
    if data[:3] != b"\0\0\x08":
        raise SystemExit(f"{file}: not an IDX file of unsigned bytes")
    shape = np.frombuffer(data, dtype=">i4", count=data[3], offset=4)
    return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def read_images(
    folder: Path, part: str, batch: int, *, count: int | None = None, seed: int | None = None
) -> tf.data.Dataset:
    """Batches of pixels, uint8 of shape (28, 28, 1), and classes of the first `count` images of ``train`` or ``t10k``.

    All workers shuffle alike, and the strategy gives each its own part.
    """
    pixels, labels = (read_idx(folder / f"{part}-{kind}-ubyte.gz")[:count] for kind in ("images-idx3", "labels-idx1"))
    images = tf.data.Dataset.from_tensor_slices((pixels[..., None], labels))
    if seed is not None:
        images = images.shuffle(len(pixels), seed=seed)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return images.batch(batch, drop_remainder=True).with_options(options)


def small_network() -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential([
        layers.Input((28, 28, 1)),
        layers.Rescaling(1 / 255),
        layers.Conv2D(16, 3, activation="relu", padding="same"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu", padding="same"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10),
    ])  # fmt: skip


class Checkpoints(tf.keras.callbacks.Callback):
    """All workers write the state after each epoch, because all must; only the chief's is kept."""

    def __init__(self, folder: Path, model: tf.keras.Model, *, is_chief: bool) -> None:
        super().__init__()
        self.epoch = tf.Variable(0, dtype=tf.int64)
        self.is_chief = is_chief
        self._kept = folder
        own = str(folder) if is_chief else tempfile.mkdtemp()
        state = tf.train.Checkpoint(model=model, optimizer=model.optimizer, epoch=self.epoch)
        self._manager = tf.train.CheckpointManager(state, own, max_to_keep=2)

    def resume(self) -> int:
        """Load the last checkpoint, which every host has; returns how many epochs are done."""
        if found := tf.train.latest_checkpoint(str(self._kept)):
            self._manager.checkpoint.restore(found)
            if self.is_chief:
                say(f"resuming from {found}: epoch {int(self.epoch) + 1}")
        return int(self.epoch)

    def on_epoch_end(self, epoch: int, _logs: object = None) -> None:
        self.epoch.assign(epoch + 1)
        self._manager.save()
        if gpurun and self.is_chief:
            gpurun.checkpointed(epoch + 1)


class Told(tf.keras.callbacks.Callback):
    """Says how far training has come: a line for each epoch, and gpurun every step."""

    def __init__(self, first_step: int) -> None:
        super().__init__()
        self._step = first_step

    def on_train_batch_end(self, _batch: int, logs: dict[str, float]) -> None:
        self._step += 1
        if gpurun:
            gpurun.progress(self._step, of=self.params["steps"] * self.params["epochs"], loss=float(logs["loss"]))

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        say(f"epoch {epoch + 1}/{self.params['epochs']}: loss {logs['loss']:.4f}")


def wait_for_ends(others: list[str]) -> None:
    """Wait until no other worker listens any more: worker 0 has the service that all of them need until they end."""
    for where in others:
        host, _, port = where.rpartition(":")
        try:
            while True:
                socket.create_connection((host, int(port))).close()
                time.sleep(0.1)
        except OSError:
            continue


def say(text: str) -> None:
    print(text + "\n", end="", flush=True)


def main() -> int:
    arguments = parse_arguments()
    told = json.loads(os.environ.get("TF_CONFIG") or "{}")
    index = told["task"]["index"] if told else 0
    is_chief = index == 0
    tf.keras.utils.set_random_seed(arguments.seed)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # the first thing of all: it starts the worker's server
    size = strategy.num_replicas_in_sync
    say(f"worker {index} of {size} on {socket.gethostname()}")
    with strategy.scope():
        model = small_network()
        model.compile(
            tf.keras.optimizers.legacy.Adam(arguments.learning_rate * size**0.5),
            tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
        )  # fmt: skip
        model.optimizer._create_all_weights(model.trainable_variables)
    batch = arguments.batch * size
    images = read_images(arguments.data, "train", batch, count=arguments.images, seed=arguments.seed)
    checkpoints = Checkpoints(arguments.outputs, model, is_chief=is_chief) if arguments.outputs else None
    first = checkpoints.resume() if checkpoints else 0
    callbacks = [*([checkpoints] if checkpoints else []), Told(first * len(images))]
    started = time.monotonic()
    model.fit(images, initial_epoch=first, epochs=arguments.epochs, callbacks=callbacks, verbose=0)
    _, accuracy = model.evaluate(read_images(arguments.data, "t10k", 500), verbose=0)
    if is_chief:
        say(f"trained for {time.monotonic() - started:.1f} s, test accuracy {accuracy:.4f}")
        wait_for_ends(told["cluster"]["worker"][1:] if told else [])
    return 0 if accuracy >= arguments.accuracy else 1


if __name__ == "__main__":
    sys.exit(main())
