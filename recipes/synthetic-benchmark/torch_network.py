"""The networks in PyTorch."""

from __future__ import annotations

import argparse
import time

import models
import torch
from torch import nn

CLASSES = 1000


class Pause(torch.autograd.Function):
    """Hands a value on, later: so long on its way forward, so long on its way back."""

    @staticmethod
    def forward(context, value, forward_s: float, backward_s: float):
        context.backward_s = backward_s
        time.sleep(forward_s)
        return value.clone()

    @staticmethod
    def backward(context, upstream):
        time.sleep(context.backward_s)
        return upstream, None, None


class Paced(nn.Module):
    """Layers whose gradients are as large as a real network's, and whose arithmetic is a pause."""

    def __init__(self, network: models.PacedNetwork, batch: int, slowdown: float) -> None:
        super().__init__()
        self.pauses = network.pauses(batch, slowdown)
        self.weights = nn.ParameterList(torch.zeros(layer.parameters) for layer in network.layers)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        value = pixels.mean()
        for weight, (forward_s, backward_s) in zip(self.weights, self.pauses, strict=True):
            value = Pause.apply(value * (1 + weight.mean()), forward_s, backward_s)
        return value


class Bottleneck(nn.Module):
    """A residual block: He et al. 2015, https://arxiv.org/abs/1512.03385; the stride is on the 3×3 convolution."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.around = nn.Identity() if before == after and stride == 1 else nn.Sequential(
            nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
        )  # fmt: skip

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(value) + self.around(value))


def resnet(*blocks: int) -> nn.Module:
    """ResNet-50 is 3, 4, 6, 3 (25,557,032 parameters); ResNet-101 is 3, 4, 23, 3 (44,549,160)."""
    parts = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for number in range(count):
            parts.append(Bottleneck(before, width, 2 if stage and not number else 1))
            before = 4 * width
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


def vgg_16() -> nn.Module:
    """Simonyan and Zisserman 2014, https://arxiv.org/abs/1409.1556: 138,357,544 parameters."""
    parts, before = [], 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            parts += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
            before = width
        parts.append(nn.MaxPool2d(2))
    dense = [nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 4096), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts, nn.Flatten(), *dense, nn.Linear(4096, CLASSES))


def inception_v3() -> nn.Module:
    try:
        from torchvision.models import inception_v3 as make  # noqa: PLC0415  not in every image
    except ImportError:
        raise SystemExit("inception-v3 in PyTorch needs torchvision, which the image lacks") from None
    return make(weights=None, aux_logits=False, init_weights=False)


def tiny() -> nn.Module:
    quarter = models.side("tiny") // 4
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * quarter * quarter, 64), nn.ReLU(), nn.Linear(64, CLASSES),
    )  # fmt: skip


def network(arguments: argparse.Namespace) -> nn.Module:
    if arguments.model in models.PACED:
        return Paced(models.PACED[arguments.model], arguments.batch, arguments.slowdown)
    make = {
        "resnet-50": lambda: resnet(3, 4, 6, 3), "resnet-101": lambda: resnet(3, 4, 23, 3), "vgg-16": vgg_16,
        "inception-v3": inception_v3, "tiny": tiny,
    }  # fmt: skip
    return make[arguments.model]()


def loss(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """The paced networks' only output is their loss."""
    return scores if scores.ndim == 0 else nn.functional.cross_entropy(scores, classes)
