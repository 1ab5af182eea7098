"""Train a small convolutional network on Fashion-MNIST with JAX on several hosts, and check it.

An ordinary multi-process JAX program: the batch is sharded over the devices of all processes, the network is on
each, and XLA inserts the sums of gradients that follow from that (https://docs.jax.dev/en/latest/multi_process.html).
The learning rate grows with the number of ranks after a warm-up (Goyal et al. 2017, https://arxiv.org/abs/1706.02677).
Rank 0 writes checkpoints to ``$GPURUN_OUTPUTS``; a later start with the same folder continues from the last one, also
with another number of ranks.

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
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

try:
    import gpurun_runtime as gpurun  # in the container of a gpurun job; the script runs without it, too
except ImportError:
    gpurun = None

Network = dict[str, jax.Array]
CLASSES = 10
STOPPED = 128 + signal.SIGTERM
AGREE_EVERY = 10  # steps between asking all ranks whether one of them was told to stop
ADAM = optax.scale_by_adam()  # which way to step; `train_step` says how far


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--outputs", type=Path, default=os.environ.get("GPURUN_OUTPUTS") or None)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=60_000, help="train on the first so many")
    parser.add_argument("--batch", type=int, default=64, help="images per rank and step")
    parser.add_argument("--learning-rate", type=float, default=0.001, help="of one rank alone")
    parser.add_argument("--warmup", type=float, default=1.0, help="epochs until the learning rate is scaled up")
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
    """Pixels, float32 of shape (count, 28, 28, 1) from 0 to 1, and classes, int32 of shape (count,)."""
    pixels, labels = (read_idx(folder / f"{part}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    return pixels[..., None].astype(np.float32) / 255, labels.astype(np.int32)


def new_network(seed: int) -> Network:
    """Weights after Glorot and Bengio, 2010."""
    shapes = {"conv1": (3, 3, 1, 16), "conv2": (3, 3, 16, 32), "dense1": (7 * 7 * 32, 64), "dense2": (64, CLASSES)}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    init = jax.nn.initializers.glorot_uniform()
    weights = {name: init(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
    return weights | {f"{name} bias": jnp.zeros(shape[-1]) for name, shape in shapes.items()}


def convolve(network: Network, name: str, x: jax.Array) -> jax.Array:
    """A convolution, ReLU, and the largest of each 2 × 2 pixels."""
    x = jax.lax.conv_general_dilated(x, network[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = jax.nn.relu(x + network[f"{name} bias"])
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def scores(network: Network, pixels: jax.Array) -> jax.Array:
    """Unnormalised log-probabilities, of shape (batch, classes)."""
    x = convolve(network, "conv2", convolve(network, "conv1", pixels)).reshape(len(pixels), -1)
    x = jax.nn.relu(x @ network["dense1"] + network["dense1 bias"])
    return x @ network["dense2"] + network["dense2 bias"]


def loss_of(network: Network, pixels: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy over the images of all ranks."""
    chances = jax.nn.log_softmax(scores(network, pixels))
    return -jnp.mean(jnp.take_along_axis(chances, labels[:, None], axis=1))


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(
    network: Network, moments: optax.OptState, rate: float, pixels: jax.Array, labels: jax.Array
) -> tuple[Network, optax.OptState, jax.Array]:
    """One step of Adam on the batch of all ranks: the network and Adam's moments after it, and the loss."""
    loss, slopes = jax.value_and_grad(loss_of)(network, pixels, labels)
    ways, moments = ADAM.update(slopes, moments)
    return optax.apply_updates(network, jax.tree.map(lambda way: -rate * way, ways)), moments, loss


@jax.jit
def count_right(network: Network, pixels: jax.Array, labels: jax.Array) -> jax.Array:
    """How many images of all ranks are classified right; a class of -1 is never right."""
    return jnp.sum(scores(network, pixels).argmax(1) == labels)


def shard(count: int, *, rank: int, size: int, seed: int, epoch: int) -> np.ndarray:
    """This rank's share of `count` examples in this epoch's order: every example is in exactly one share."""
    return np.random.default_rng((seed, epoch)).permutation(count)[rank::size]


def scaled_learning_rate(alone: float, size: int, position: float, warmup: float) -> float:
    """Learning rate at `position` (in epochs): from `alone` to `alone` × `size` over `warmup` epochs."""
    done = 1.0 if warmup <= 0 else min(1.0, position / warmup)
    return alone * (1 + (size - 1) * done)


class Stop:
    """Becomes true on SIGTERM; `agreed` tells all ranks alike, so that they stop at the same step."""

    def __init__(self) -> None:
        self._told = False
        signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, _number: int, _frame: object) -> None:
        self._told = True

    def agreed(self) -> bool:
        """Whether any rank was told; every rank must call it at the same step."""
        return bool(multihost_utils.process_allgather(np.array(self._told)).any())


class Trainer:
    """The network, Adam's moments and how far training has come, the same on every rank."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        mesh = jax.make_mesh((jax.device_count(),), ("ranks",))
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        self.by_rank = NamedSharding(mesh, PartitionSpec("ranks"))
        self.arguments, self.rank, self.size = arguments, jax.process_index(), jax.process_count()
        network = new_network(arguments.seed)
        self.network, self.moments = self._placed((network, ADAM.init(network)))
        self.epoch, self.seen, self.steps = 0, 0, 0  # `seen`: images of this epoch, by all ranks together
        self.checkpoint = arguments.outputs / "last.npz" if arguments.outputs else None

    def _placed(self, tree: Any) -> Any:
        """A tree of arrays that every rank has alike, as one on the devices of all."""
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(self.everywhere, np.asarray(x)), tree)

    def shared(self, *arrays: np.ndarray) -> list[jax.Array]:
        """Each rank's arrays as parts of one that all ranks share."""
        return [jax.make_array_from_process_local_data(self.by_rank, array) for array in arrays]

    def resume(self) -> None:
        """Load the last checkpoint, if there is one: every rank finds it."""
        if self.checkpoint and self.checkpoint.exists():
            shape = jax.tree.structure((self.network, self.moments))
            with np.load(self.checkpoint) as saved:
                leaves = [saved[f"leaf {number}"] for number in range(shape.num_leaves)]
                self.epoch, self.seen, self.steps = (int(saved[name]) for name in ("epoch", "seen", "steps"))
            self.network, self.moments = self._placed(jax.tree.unflatten(shape, leaves))
            if self.rank == 0:
                say(f"resuming from {self.checkpoint}: epoch {self.epoch + 1}, {self.seen} images into it")

    def save(self) -> None:
        """Write a checkpoint, whole or not at all; only rank 0 does, and only where there is a folder for it."""
        if self.checkpoint and self.rank == 0:
            leaves = jax.tree.leaves((self.network, self.moments))
            arrays = {f"leaf {number}": np.asarray(leaf) for number, leaf in enumerate(leaves)}
            new = self.checkpoint.with_suffix(".new.npz")
            np.savez(new, epoch=self.epoch, seen=self.seen, steps=self.steps, **arrays)
            new.replace(self.checkpoint)
            if gpurun:
                gpurun.checkpointed(self.steps)

    def run_epoch(self, pixels: np.ndarray, labels: np.ndarray, stop: Stop) -> bool:
        """Train the rest of the current epoch. False if a rank was told to stop before it ended."""
        chosen = self.arguments
        mine = shard(len(labels), rank=self.rank, size=self.size, seed=chosen.seed, epoch=self.epoch)
        steps = len(labels) // (chosen.batch * self.size)
        first = self.seen // (chosen.batch * self.size)
        losses, started = [], time.monotonic()
        for number in range(first, steps):
            if number % AGREE_EVERY == 0 and stop.agreed():
                return False
            rate = scaled_learning_rate(chosen.learning_rate, self.size, self.epoch + number / steps, chosen.warmup)
            batch = mine[number * chosen.batch : (number + 1) * chosen.batch]
            images = self.shared(pixels[batch], labels[batch])
            self.network, self.moments, loss = train_step(self.network, self.moments, rate, *images)
            losses.append(float(loss))
            self.seen, self.steps = (number + 1) * chosen.batch * self.size, self.steps + 1
            if gpurun:
                gpurun.progress(self.epoch * steps + number + 1, of=chosen.epochs * steps, loss=losses[-1])
        self.epoch, self.seen = self.epoch + 1, 0
        rate = len(losses) * chosen.batch / (time.monotonic() - started)
        self.save()  # before anybody hears of the epoch
        say(f"epoch {self.epoch}/{chosen.epochs}: loss {np.mean(losses):.4f}, {rate:.0f} images/s on this rank")
        return True

    def accuracy(self, pixels: np.ndarray, labels: np.ndarray) -> float:
        """Share of images that the network classifies right, each rank judging its own part."""
        right, batch = 0, 500
        for start in range(0, len(labels), batch * self.size):
            part = slice(start + self.rank * batch, start + (self.rank + 1) * batch)
            missing = batch - len(labels[part])
            images = np.pad(pixels[part], ((0, missing), (0, 0), (0, 0), (0, 0)))
            classes = np.pad(labels[part], (0, missing), constant_values=-1)
            right += int(count_right(self.network, *self.shared(images, classes)))
        return right / len(labels)

    def same_on_all_ranks(self) -> bool:
        """Whether every rank holds the same network: nothing but the sums of gradients makes it so."""
        mine = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(self.network)])
        return bool(np.allclose(multihost_utils.process_allgather(mine), mine, rtol=1e-4, atol=1e-4))


def join() -> None:
    """Meet the other ranks, if there are any. JAX finds the coordinator's address by itself."""
    if "JAX_NUM_PROCESSES" in os.environ:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # where there are no GPUs
        jax.distributed.initialize(
            num_processes=int(os.environ["JAX_NUM_PROCESSES"]), process_id=int(os.environ["JAX_PROCESS_ID"])
        )


def say(text: str) -> None:
    print(text + "\n", end="", flush=True)


def main() -> int:
    arguments = parse_arguments()
    join()
    stop = Stop()
    trainer = Trainer(arguments)
    say(f"rank {trainer.rank} of {trainer.size} on {socket.gethostname()}, {jax.local_devices()[0]}")
    pixels, labels = (each[: arguments.images] for each in read_images(arguments.data, "train"))
    trainer.resume()
    started = time.monotonic()
    while trainer.epoch < arguments.epochs:
        if not trainer.run_epoch(pixels, labels, stop):
            trainer.save()
            say(f"told to stop after {trainer.seen} images of epoch {trainer.epoch + 1}")
            multihost_utils.sync_global_devices("saved")  # who leaves first ends the others
            return STOPPED
    accuracy = trainer.accuracy(*read_images(arguments.data, "t10k"))
    same = trainer.same_on_all_ranks()
    if trainer.rank == 0:
        say(f"trained for {time.monotonic() - started:.1f} s, test accuracy {accuracy:.4f}")
        if accuracy < arguments.accuracy:
            say(f"that is less than {arguments.accuracy}")
        if not same:
            say("the ranks' networks differ: gradients were not averaged")
    return 0 if same and accuracy >= arguments.accuracy else 1


if __name__ == "__main__":
    sys.exit(main())
