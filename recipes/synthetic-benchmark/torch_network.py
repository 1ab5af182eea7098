"""The networks in PyTorch."""

from __future__ import annotations

import argparse
import os
import shutil
import sysconfig
import time
from pathlib import Path

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


class Block(nn.Module):
    """One layer of a transformer: attention that looks back, then two dense layers, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mixed, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = value.shape
        parts = self.mixed(self.norm(value)).view(batch, sequence, 3, self.heads, width // self.heads)
        query, key, given = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, given, is_causal=True)
        value = value + self.out(seen.transpose(1, 2).reshape(batch, sequence, width))
        return value + self.dense(value)


class Decoder(nn.Module):
    """GPT-2 (Radford et al. 2019), without dropout."""

    def __init__(self, network: models.Transformer, sequence: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(network.vocabulary, network.width), nn.Embedding(sequence, network.width)
        self.blocks = nn.Sequential(*(Block(network.width, network.heads) for _ in range(network.layers)))
        self.norm = nn.LayerNorm(network.width)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return nn.functional.linear(self.norm(self.blocks(value)), self.words.weight).flatten(0, 1)


def network(arguments: argparse.Namespace) -> nn.Module:
    if arguments.model in models.PACED:
        return Paced(models.PACED[arguments.model], arguments.batch, arguments.slowdown)
    if arguments.model in models.TRANSFORMERS:
        return Decoder(models.TRANSFORMERS[arguments.model], arguments.sequence)
    make = {
        "resnet-50": lambda: resnet(3, 4, 6, 3), "resnet-101": lambda: resnet(3, 4, 23, 3), "vgg-16": vgg_16,
        "inception-v3": inception_v3, "tiny": tiny,
    }  # fmt: skip
    return make[arguments.model]()


def synthetic(arguments: argparse.Namespace, batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of noise and its classes; every step trains on it again."""
    if found := models.TRANSFORMERS.get(arguments.model):
        tokens = torch.randint(found.vocabulary, (batch, arguments.sequence + 1), device=device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
    side = models.side(arguments.model)
    return torch.rand(batch, 3, side, side, device=device), torch.randint(CLASSES, (batch,), device=device)


def optimizer(net: nn.Module, arguments: argparse.Namespace, *, is_fused: bool) -> torch.optim.Optimizer:
    """AdamW for transformers, SGD for images, as people train them; synthetic data teaches nothing at any rate."""
    if arguments.model in models.TRANSFORMERS:
        return torch.optim.AdamW(net.parameters(), lr=1e-6, fused=is_fused)
    return torch.optim.SGD(net.parameters(), lr=1e-6)


def lacks_to_compile() -> str:
    """What `torch.compile` needs and this machine lacks: Triton and Inductor build small C extensions of Python."""
    names = (os.environ.get("CC", "gcc"), "gcc", "clang")
    missing = [] if any(map(shutil.which, names)) else ["C compiler"]
    headers = Path(sysconfig.get_config_var("INCLUDEPY") or sysconfig.get_paths()["include"])
    missing += [] if (headers / "Python.h").exists() else ["Python.h (python3-dev)"]
    return " and no ".join(missing)


def use_tf32(allowed: bool) -> None:
    """Let GPUs multiply fp32 as TF32, in dense layers and convolutions, or not."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Compute in half precision where that is safe; weights and gradients stay fp32."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device.type, dtype=kind or torch.bfloat16, enabled=kind is not None)


def loss(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """The paced networks' only output is their loss."""
    return scores if scores.ndim == 0 else nn.functional.cross_entropy(scores, classes)
