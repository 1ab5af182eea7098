"""Train a network with one hidden layer on a part of Fashion-MNIST, and report how well it does after each epoch.

Uses only NumPy, to show just the sweep. The sweep sets the parameters; without a sweep the defaults apply.
After each epoch a checkpoint goes to ``$GPURUN_OUTPUTS``; a later start with the same folder continues from it.

Exit codes: 0 trained; 143 stopped by SIGTERM after a checkpoint.
"""

from __future__ import annotations

import gzip
import signal
import sys
from pathlib import Path

import gpurun_runtime as gpurun
import numpy as np

DATA = Path("/usr/share/datasets/fashion-mnist")
TRAINED, VALIDATED, EPOCHS = 20_000, 5_000, 27
DEFAULTS = {"lr": 0.1, "momentum": 0.9, "hidden": 64, "batch": 32}


def read_idx(file: Path) -> np.ndarray:
    """An array of unsigned bytes in the IDX format (http://yann.lecun.com/exdb/mnist), gzipped."""
    data = gzip.decompress(file.read_bytes())
    shape = np.frombuffer(data, dtype=">i4", count=data[3], offset=4)
    return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def images(first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels, float32 of shape (count, 784) from 0 to 1, and classes of shape (count,), of the training part."""
    pixels = read_idx(DATA / "train-images-idx3-ubyte.gz")[first : first + count]
    classes = read_idx(DATA / "train-labels-idx1-ubyte.gz")[first : first + count]
    return pixels.reshape(count, -1).astype(np.float32) / 255, classes


class Network:
    """784 → hidden → 10, ReLU between, softmax behind; trained by gradient descent with momentum."""

    def __init__(self, hidden: int) -> None:
        random = np.random.default_rng(7)
        shapes = [(784, hidden), (hidden,), (hidden, 10), (10,)]
        self.weights = [
            random.normal(0, (2 / shape[0]) ** 0.5 if len(shape) == 2 else 0, shape).astype(np.float32)
            for shape in shapes
        ]
        self.moving = [np.zeros_like(weight) for weight in self.weights]

    def forward(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The hidden layer's values, and the probability of each class."""
        into, bias, out, last = self.weights
        hidden = np.maximum(pixels @ into + bias, 0)
        scores = hidden @ out + last
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return hidden, powers / powers.sum(axis=1, keepdims=True)

    def step(self, pixels: np.ndarray, classes: np.ndarray, rate: float, momentum: float) -> None:
        """One step down the gradient of the mean cross-entropy."""
        hidden, found = self.forward(pixels)
        error = found
        error[np.arange(len(classes)), classes] -= 1
        error /= len(classes)
        behind = (error @ self.weights[2].T) * (hidden > 0)
        gradients = [pixels.T @ behind, behind.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
        self.moving = [momentum * m - rate * g for m, g in zip(self.moving, gradients, strict=True)]
        self.weights = [weight + m for weight, m in zip(self.weights, self.moving, strict=True)]


def main() -> int:
    parameters = {**DEFAULTS, **gpurun.parameters()}
    gpurun.stopping()
    network = Network(parameters["hidden"])
    checkpoint = Path(gpurun.outputs()) / "checkpoint.npz"
    first = 0
    if checkpoint.exists():
        kept = np.load(checkpoint)
        first = int(kept["epoch"])
        network.weights = [kept[f"w{n}"] for n in range(4)]
        network.moving = [kept[f"m{n}"] for n in range(4)]
    pixels, classes = images(0, TRAINED)
    unseen, truth = images(TRAINED, VALIDATED)
    for epoch in range(first, EPOCHS):
        order = np.random.default_rng(epoch).permutation(TRAINED)
        for begin in range(0, TRAINED, parameters["batch"]):
            chosen = order[begin : begin + parameters["batch"]]
            network.step(pixels[chosen], classes[chosen], parameters["lr"], parameters["momentum"])
        accuracy = float((network.forward(unseen)[1].argmax(axis=1) == truth).mean())
        kept = {f"w{n}": weight for n, weight in enumerate(network.weights)}
        kept |= {f"m{n}": moving for n, moving in enumerate(network.moving)}
        part = checkpoint.with_suffix(".part.npz")
        np.savez(part, epoch=epoch + 1, **kept)
        part.replace(checkpoint)
        gpurun.checkpointed(epoch + 1)
        gpurun.report(epoch + 1, accuracy=accuracy)
        print(f"epoch {epoch + 1}/{EPOCHS}: accuracy {accuracy:.4f} with {parameters}", flush=True)
        if gpurun.stopping():
            return 128 + signal.SIGTERM
    return 0


if __name__ == "__main__":
    sys.exit(main())
