"""Arithmetic of a step, and MFU: the share of the card's peak that training reaches. Needs no framework.

MFU is observed FLOP/s over peak FLOP/s, where only the arithmetic counts that the network itself needs (Chowdhery
et al. 2022, "PaLM", https://arxiv.org/abs/2204.02311, appendix B). A multiply-add is two FLOP, and a backward pass is
twice the forward pass.
"""

from __future__ import annotations

import models

FORWARD = {"resnet-50": 4.09e9, "resnet-101": 7.80e9, "inception-v3": 5.71e9, "vgg-16": 15.47e9}
"""Multiply-adds of an image's forward pass: the column GFLOPS of torchvision's table of weights,
https://docs.pytorch.org/vision/stable/models.html."""

PEAKS = (
    # The card's name contains all words; dense FLOP/s in bf16 and fp16, TF32, fp32. From NVIDIA's data sheets.
    (("H200",), {"bf16": 989.4e12, "fp16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}),
    (("H100", "PCIe"), {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51.2e12}),
    (("H100", "HBM3"), {"bf16": 989.4e12, "fp16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}),
    (("A100",), {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12}),
    (("L40S",), {"bf16": 362e12, "fp16": 362e12, "tf32": 183e12, "fp32": 91.6e12}),
    (("V100", "SXM2"), {"fp16": 125e12, "fp32": 15.7e12}),
    (("V100", "PCIE"), {"fp16": 112e12, "fp32": 14e12}),
    (("T4",), {"fp16": 65e12, "fp32": 8.1e12}),
    (("P100", "SXM2"), {"fp16": 21.2e12, "fp32": 10.6e12}),
    (("P100", "PCIE"), {"fp16": 18.7e12, "fp32": 9.3e12}),
)


def peak_flop_per_s(card: str, precision: str) -> float | None:
    """Return the card's peak; None for a card or a precision that the table lacks."""
    words = card.upper().replace("-", " ").split()
    for names, peaks in PEAKS:
        if all(name.upper() in words for name in names):
            return peaks.get(precision)
    return None


def item_flop(model: str, sequence: int) -> float | None:
    """Return the FLOP of training on one item, an image or a token; None if it is not known.

    For a token, PaLM's formula: 6 N + 12 L H Q T, where N are the parameters, L the layers, H · Q the width, and T the
    tokens of a sequence. It counts attention in full, although half of it is masked.
    """
    if network := models.TRANSFORMERS.get(model):
        return 6.0 * network.parameters(sequence) + 12.0 * network.layers * network.width * sequence
    forward = FORWARD.get(model)
    return None if forward is None else 3 * 2 * forward


def figures(model: str, sequence: int, precision: str, items_per_s: float, card: str) -> dict[str, float | None]:
    """Return what a rank's rate is in FLOP/s, and its MFU."""
    each, peak = item_flop(model, sequence), peak_flop_per_s(card, precision)
    done = None if each is None else each * items_per_s
    return {"model_flop_per_s": done, "mfu": None if done is None or peak is None else done / peak}
