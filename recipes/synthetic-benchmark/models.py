"""What the benchmark can train: names, sizes, and the layers of the paced networks. Needs no framework."""

from __future__ import annotations

from dataclasses import dataclass

PIXELS = {"tiny": 32, "inception-v3": 299}
"""Side of a synthetic image in pixels; the default is 224."""
BATCH = {"tiny": 32, "gpt2-tiny": 4, "gpt2": 4, "gpt2-medium": 2, "gpt2-large": 1, "gpt2-xl": 1}
"""Images or sequences per rank and step, without a GPU and as in 2017; the default is 64."""
LARGEST_BATCH = {"tiny": 32, "gpt2-tiny": 4, "gpt2": 64, "gpt2-medium": 32, "gpt2-large": 16, "gpt2-xl": 8}
"""The most on a GPU, if its memory holds it; the default is 256."""
REAL = ("tiny", "resnet-50", "resnet-101", "inception-v3", "vgg-16")
SHRINK = 10
"""A paced network has a tenth of its namesake's parameters."""
SLOWDOWN = 2.5
"""It computes so much longer than its namesake on a P100: a tenth of the bytes over 1/25 of 25 Gbit/s."""


@dataclass(frozen=True)
class PacedLayer:
    """A layer with a gradient of its real shape in bytes, and with a pause in place of its arithmetic.

    Attributes:
        parameters: how many numbers its gradient has.
        share: its part of the network's arithmetic.
    """

    parameters: int
    share: float


@dataclass(frozen=True)
class PacedNetwork:
    """A network whose exchange is real and whose arithmetic is a pause, as a CPU waits for its GPU.

    Attributes:
        rate: images/s of the namesake on one P100 with a batch of 64 and synthetic images.
            Source: https://www.tensorflow.org/performance/benchmarks (2017), DGX-1.
        layers: from the input to the output.
    """

    rate: float
    layers: tuple[PacedLayer, ...]

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    def pauses(self, batch: int, slowdown: float = SLOWDOWN) -> list[tuple[float, float]]:
        """Seconds that each layer computes, forward and backward: a third and two thirds of its share."""
        step_s = batch / self.rate * slowdown
        return [(step_s * layer.share / 3, step_s * layer.share * 2 / 3) for layer in self.layers]


def _paced(rate: float, thousands: list[float], work: list[float]) -> PacedNetwork:
    layers = zip(thousands, work, strict=True)
    return PacedNetwork(rate, tuple(PacedLayer(round(k * 1000 / SHRINK), w / sum(work)) for k, w in layers))


PACED = {
    # The stem, 16 bottleneck blocks that cost about the same arithmetic each, and the dense layer.
    "resnet-like": _paced(
        219.0,
        [9.5, 75, 70, 70, 379, 280, 280, 280, 1512, 1117, 1117, 1117, 1117, 1117, 6040, 4463, 4463, 2049],
        [0.5, *[1.0] * 16, 0.01],
    ),
    # 13 convolutions, and three dense layers that have 9 of 10 parameters and next to no arithmetic.
    "vgg-like": _paced(
        154.0,
        [1.8, 37, 74, 148, 295, 590, 590, 1180, 2360, 2360, 2360, 2360, 2360, 102765, 16781, 4097],
        [0.087, 1.85, 0.925, 1.85, 0.925, 1.85, 1.85, 0.925, 1.85, 1.85, 0.46, 0.46, 0.46, 0.103, 0.017, 0.004],
    ),
}


@dataclass(frozen=True)
class Transformer:
    """A decoder of GPT-2's kind (Radford et al. 2019): the output layer shares the weights of the embedding.

    Attributes:
        vocabulary: GPT-2 has 50,257 words; a multiple of 64 suits tensor cores.
        sequence: tokens of a sequence, by default.
    """

    layers: int
    heads: int
    width: int
    vocabulary: int = 50_304
    sequence: int = 1024

    def parameters(self, sequence: int) -> int:
        """All that is trained: embeddings of words and places; in each layer attention (4 w² + 4 w), the two dense
        layers (8 w² + 5 w) and two norms (4 w); and the last norm.
        """
        width = self.width
        return (self.vocabulary + sequence) * width + self.layers * (12 * width**2 + 13 * width) + 2 * width


TRANSFORMERS = {
    "gpt2-tiny": Transformer(2, 2, 64, vocabulary=2048, sequence=64),
    "gpt2": Transformer(12, 12, 768),
    "gpt2-medium": Transformer(24, 16, 1024),
    "gpt2-large": Transformer(36, 20, 1280),
    "gpt2-xl": Transformer(48, 25, 1600),
}
NAMES = (*REAL, *TRANSFORMERS, *PACED)


def sequence(model: str, wanted: int | None) -> int:
    """Tokens of a sequence; 0 for a network of images."""
    network = TRANSFORMERS.get(model)
    return (wanted or network.sequence) if network else 0


def unit(model: str) -> str:
    """What the rate counts."""
    return "tokens" if model in TRANSFORMERS else "images"


def items(model: str, batch: int, tokens: int) -> int:
    """What a rank trains on in a step, in this unit; `tokens` of a sequence."""
    return batch * tokens if model in TRANSFORMERS else batch


def side(model: str) -> int:
    """Pixels of an image's side."""
    return PIXELS.get(model, 8 if model in PACED else 224)
