"""The networks in TensorFlow, behind one face: variables, and the gradients of one step."""

from __future__ import annotations

import argparse

import models
import tensorflow as tf
from tensorflow.python.data.experimental.ops.testing import sleep

CLASSES = 1000


def use_threads(threads: int) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))


def synthetic(arguments: argparse.Namespace) -> tuple[tf.Tensor, tf.Tensor]:
    """One batch of noise and classes; every step trains on it again."""
    side = models.side(arguments.model)
    pixels = tf.random.stateless_uniform((arguments.batch, side, side, 3), (7, 7))
    return pixels, tf.random.stateless_uniform((arguments.batch,), (7, 8), maxval=CLASSES, dtype=tf.int32)


def pause(value: tf.Tensor, seconds: float) -> tf.Tensor:
    """The same value, so much later. A data set sleeps: an operation without Python, so that servers can run it."""
    return tf.data.Dataset.from_tensors(value).apply(sleep(int(seconds * 1e6))).take(1).get_single_element()


def paced(value: tf.Tensor, forward_s: float, backward_s: float) -> tf.Tensor:
    @tf.custom_gradient
    def layer(given: tf.Tensor):
        return pause(given, forward_s), lambda upstream: pause(upstream, backward_s)

    return layer(value)


class Paced(tf.Module):
    """Layers whose gradients are as large as a real network's, and whose arithmetic is a pause."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        network = models.PACED[arguments.model]
        self._pauses = network.pauses(arguments.batch, arguments.slowdown)
        self.weights = [tf.Variable(tf.zeros(layer.parameters)) for layer in network.layers]

    @property
    def trained(self) -> list[tf.Variable]:
        """All of them; a variable that lies on several parameter servers is as many."""
        return [part for weight in self.weights for part in getattr(weight, "variables", [weight])]

    def loss(self, pixels: tf.Tensor, _classes: tf.Tensor) -> tf.Tensor:
        value = tf.reduce_mean(pixels)
        for weight, (forward_s, backward_s) in zip(self.weights, self._pauses, strict=True):
            value = paced(value * (1.0 + tf.reduce_mean(weight)), forward_s, backward_s)
        return value


class Real:
    """A network of tf.keras.applications, or the tiny one."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        make = {
            "resnet-50": tf.keras.applications.ResNet50, "resnet-101": tf.keras.applications.ResNet101,
            "inception-v3": tf.keras.applications.InceptionV3, "vgg-16": tf.keras.applications.VGG16,
        }  # fmt: skip
        kind = make.get(arguments.model)
        self._model = _tiny() if kind is None else kind(weights=None, classifier_activation=None)

    @property
    def trained(self) -> list[tf.Variable]:
        return self._model.trainable_variables

    def loss(self, pixels: tf.Tensor, classes: tf.Tensor) -> tf.Tensor:
        scores = self._model(pixels, training=True)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(classes, scores))


def _tiny() -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential([
        layers.Input((models.side("tiny"), models.side("tiny"), 3)),
        layers.Conv2D(16, 3, activation="relu", padding="same"), layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu", padding="same"), layers.MaxPooling2D(),
        layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(CLASSES),
    ])  # fmt: skip


def network(arguments: argparse.Namespace) -> Paced | Real:
    return Paced(arguments) if arguments.model in models.PACED else Real(arguments)


def gradients(net: Paced | Real, pixels: tf.Tensor, classes: tf.Tensor, tape_of=lambda tape: tape) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        loss = net.loss(pixels, classes)
    return tape_of(tape).gradient(loss, net.trained)


def gradient_bytes(net: Paced | Real) -> int:
    return sum(variable.shape.num_elements() * variable.dtype.size for variable in net.trained)


RATE = 1e-6
"""The learning rate: synthetic images teach nothing, and weights must stay finite."""


def apply(net: Paced | Real, found: list[tf.Tensor]) -> None:
    for variable, gradient in zip(net.trained, found, strict=True):
        variable.assign_sub(RATE * gradient)


class Alone:
    """Steps of this process alone, with nothing exchanged: how long it computes."""

    def __init__(self, arguments: argparse.Namespace, net: Paced | Real | None = None) -> None:
        self.net = net or network(arguments)
        self.batch = synthetic(arguments)

    @tf.function
    def step(self) -> None:
        apply(self.net, gradients(self.net, *self.batch))
