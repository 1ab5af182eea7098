"""The networks in TensorFlow, behind one face: variables, and the gradients of one step."""

from __future__ import annotations

import argparse
import os

import choices
import models

os.environ.setdefault("TF_XLA_FLAGS", "--tf_xla_cpu_global_jit")  # else `--compile` would do nothing on a CPU

import tensorflow as tf  # reads the flags
from tensorflow.python.data.experimental.ops.testing import sleep

CLASSES = 1000


def use_threads(threads: int) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))


def card() -> choices.Card | None:
    """The GPU of this process."""
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return None
    told = tf.config.experimental.get_device_details(gpus[0])
    return choices.Card(told.get("device_name", ""), tuple(told.get("compute_capability", (0, 0))))


def use(arguments: argparse.Namespace) -> None:
    """Set the policy of Keras and XLA, before there is a network. XLA compiles what lies between Horovod's operations,
    so that the exchange of a gradient still begins when the gradient is there. TensorFlow itself uses channels-last.
    """
    kind = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}.get(arguments.precision, "float32")
    tf.keras.mixed_precision.set_global_policy(kind)
    tf.config.experimental.enable_tensor_float_32_execution(arguments.precision != "fp32")
    tf.config.optimizer.set_jit("autoclustering" if arguments.compile else False)


def synthetic(arguments: argparse.Namespace) -> tuple[tf.Tensor, tf.Tensor]:
    """One batch of noise and classes; every step trains on it again."""
    if found := models.TRANSFORMERS.get(arguments.model):
        shape = (arguments.batch, arguments.sequence + 1)
        tokens = tf.random.stateless_uniform(shape, (7, 7), maxval=found.vocabulary, dtype=tf.int32)
        return tokens[:, :-1], tokens[:, 1:]
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
    """A network of tf.keras.applications, the tiny one, or a transformer."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        make = {
            "resnet-50": tf.keras.applications.ResNet50, "resnet-101": tf.keras.applications.ResNet101,
            "inception-v3": tf.keras.applications.InceptionV3, "vgg-16": tf.keras.applications.VGG16,
        }  # fmt: skip
        self._scale = SCALE if arguments.precision == "fp16" else 1.0
        if found := models.TRANSFORMERS.get(arguments.model):
            self._model = _decoder(found, arguments.sequence)
        elif arguments.model == "tiny":
            self._model = _tiny()
        else:
            self._model = make[arguments.model](weights=None, classifier_activation=None)

    @property
    def trained(self) -> list[tf.Variable]:
        return self._model.trainable_variables

    def loss(self, pixels: tf.Tensor, classes: tf.Tensor) -> tf.Tensor:
        scores = tf.cast(self._model(pixels, training=True), tf.float32)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(classes, scores)) * self._scale


def _tiny() -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential([
        layers.Input((models.side("tiny"), models.side("tiny"), 3)),
        layers.Conv2D(16, 3, activation="relu", padding="same"), layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu", padding="same"), layers.MaxPooling2D(),
        layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(CLASSES),
    ])  # fmt: skip


class Places(tf.keras.layers.Layer):
    """Adds an embedding of its place to each word's."""

    def build(self, shape: tf.TensorShape) -> None:
        self.places = self.add_weight("places", shape[1:], initializer=tf.keras.initializers.RandomNormal(stddev=0.02))

    def call(self, value: tf.Tensor) -> tf.Tensor:
        return value + tf.cast(self.places, value.dtype)


class Scores(tf.keras.layers.Layer):
    """The output layer, with the weights of the embedding."""

    def __init__(self, words: tf.keras.layers.Embedding) -> None:
        super().__init__()
        self._words = words

    def call(self, value: tf.Tensor) -> tf.Tensor:
        return tf.matmul(value, tf.cast(self._words.embeddings, value.dtype), transpose_b=True)


def _decoder(network: models.Transformer, sequence: int) -> tf.keras.Model:
    """GPT-2, without dropout: torch_network.Decoder in Keras."""
    layers, width = tf.keras.layers, network.width
    tokens = layers.Input((sequence,), dtype=tf.int32)
    words = layers.Embedding(network.vocabulary, width)
    value = Places()(words(tokens))
    for _ in range(network.layers):
        normed = layers.LayerNormalization()(value)
        attention = layers.MultiHeadAttention(network.heads, width // network.heads)
        value = value + attention(normed, normed, use_causal_mask=True)
        inner = layers.Dense(4 * width, tf.keras.activations.gelu)(layers.LayerNormalization()(value))
        value = value + layers.Dense(width)(inner)
    return tf.keras.Model(tokens, Scores(words)(layers.LayerNormalization()(value)))


def network(arguments: argparse.Namespace) -> Paced | Real:
    return Paced(arguments) if arguments.model in models.PACED else Real(arguments)


def gradients(net: Paced | Real, pixels: tf.Tensor, classes: tf.Tensor, tape_of=lambda tape: tape) -> list[tf.Tensor]:
    """Gradients of one step; dense, so that all of them are exchanged alike."""
    with tf.GradientTape() as tape:
        loss = net.loss(pixels, classes)
    return [tf.convert_to_tensor(each) for each in tape_of(tape).gradient(loss, net.trained)]


def gradient_bytes(found: list[tf.Tensor]) -> int:
    """Bytes of one rank's gradients as they are exchanged, by their own types: a policy leaves them in fp32."""
    return sum(each.shape.num_elements() * each.dtype.size for each in found)


RATE = 1e-6
"""The learning rate: synthetic images teach nothing, and weights must stay finite."""
SCALE = 1024.0
"""Losses of fp16 are so much larger, so that small gradients do not vanish; they are shrunk again when applied."""


def apply(net: Paced | Real, found: list[tf.Tensor]) -> None:
    for variable, gradient in zip(net.trained, found, strict=True):
        variable.assign_sub(RATE / getattr(net, "_scale", 1.0) * gradient)


def fits(arguments: argparse.Namespace, batch: int) -> bool:
    """Whether this GPU's memory holds a step with such a batch."""
    tried = argparse.Namespace(**{**vars(arguments), "batch": batch})
    try:
        Alone(tried).step()
        return True
    except tf.errors.ResourceExhaustedError:
        return False
    finally:
        tf.keras.backend.clear_session()


class Alone:
    """Steps of this process alone, with nothing exchanged: how long it computes."""

    def __init__(self, arguments: argparse.Namespace, net: Paced | Real | None = None) -> None:
        self.net = net or network(arguments)
        self.batch = synthetic(arguments)

    @tf.function
    def step(self) -> None:
        apply(self.net, gradients(self.net, *self.batch))
