"""Train a small convolutional network on Fashion-MNIST by Keras's ``model.fit`` with Horovod's callbacks, and check it.

Three lines make an ordinary Keras script a distributed one: the wrapped optimizer, the callback that gives every rank
rank 0's weights, and each rank's own part of the images. Rank 0 writes a checkpoint to ``$GPURUN_OUTPUTS``
after each epoch; a later start with the same folder continues from it, also with another number of ranks.

Exit codes: 0 trained and accurate enough; 1 not accurate enough.
"""

from __future__ import annotations

import argparse
import gzip
import os
import socket
import sys
from pathlib import Path

import horovod.tensorflow.keras as hvd
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
    parser.add_argument("--batch", type=int, default=64, help="images per rank and step")
    parser.add_argument("--learning-rate", type=float, default=0.001, help="of one rank alone")
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


def read_images(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels, uint8 of shape (count, 28, 28, 1), and classes, uint8 of shape (count,), of ``train`` or ``t10k``."""
    pixels = read_idx(folder / f"{part}-images-idx3-ubyte.gz")[..., None]
    return pixels, read_idx(folder / f"{part}-labels-idx1-ubyte.gz")


def small_network(seed: int) -> tf.keras.Model:
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(seed)
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


class Checkpoint(tf.keras.callbacks.Callback):
    """Rank 0 writes the whole state after each epoch, and reports the checkpoint."""

    def __init__(self, folder: Path, model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer) -> None:
        super().__init__()
        self.epoch = tf.Variable(0, dtype=tf.int64)
        state = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=self.epoch)
        self._manager = tf.train.CheckpointManager(state, str(folder), max_to_keep=2)

    def resume(self) -> None:
        """Load the last checkpoint, if there is one."""
        if found := self._manager.restore_or_initialize():
            say(f"resuming from {found}: epoch {int(self.epoch) + 1}")

    def on_epoch_end(self, epoch: int, _logs: object = None) -> None:
        self.epoch.assign(epoch + 1)
        self._manager.save()
        if gpurun:
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


def use_own_device() -> None:
    """One GPU a rank; without GPUs one CPU thread, so that ranks on a host don't fight."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
        tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], enable=True)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def say(text: str) -> None:
    print(text + "\n", end="", flush=True)


def main() -> int:
    arguments = parse_arguments()
    hvd.init()
    use_own_device()
    say(f"rank {hvd.rank()} of {hvd.size()} on {socket.gethostname()}")
    pixels, labels = (each[: arguments.images] for each in read_images(arguments.data, "train"))
    steps = len(labels) // (arguments.batch * hvd.size())
    model = small_network(arguments.seed)
    # Horovod 0.28 wraps Keras's earlier optimizer interface.
    adam = tf.keras.optimizers.legacy.Adam(arguments.learning_rate * hvd.size())
    optimizer = hvd.DistributedOptimizer(adam)
    optimizer._create_all_weights(model.trainable_variables)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], experimental_run_tf_function=False)
    checkpoint = None
    if arguments.outputs and hvd.rank() == 0:
        checkpoint = Checkpoint(arguments.outputs, model, optimizer)
        checkpoint.resume()
    first = int(hvd.broadcast(int(checkpoint.epoch) if checkpoint else 0, root_rank=0))
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(
            initial_lr=arguments.learning_rate * hvd.size(), warmup_epochs=1, steps_per_epoch=steps
        ),
        *([checkpoint] if checkpoint else []),
        Told(first * steps),
    ]
    mine = np.random.default_rng(arguments.seed).permutation(len(labels))[hvd.rank() :: hvd.size()]
    mine = mine[: steps * arguments.batch]  # as many steps on every rank, or some would wait for ever
    model.fit(
        pixels[mine], labels[mine], batch_size=arguments.batch, initial_epoch=first, epochs=arguments.epochs,
        callbacks=callbacks, verbose=0,
    )  # fmt: skip
    _, accuracy = model.evaluate(*read_images(arguments.data, "t10k"), batch_size=500, verbose=0)
    if hvd.rank() == 0:
        say(f"trained to test accuracy {accuracy:.4f}")
    return 0 if accuracy >= arguments.accuracy else 1


if __name__ == "__main__":
    sys.exit(main())
