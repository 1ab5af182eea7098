"""GPU generations by model, such as ``v100`` or ``Tesla P100-SXM2-16GB``.

Source: NVIDIA's CUDA GPUs page (compute capability by product).
"""

from __future__ import annotations

import re
from itertools import pairwise

FAMILIES = ("kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell")

_MODELS = {
    "kepler": ("k10", "k20", "k20x", "k40", "k80"),
    "maxwell": ("m4", "m10", "m40", "m60"),
    "pascal": ("p4", "p6", "p40", "p100", "gp100", "1080", "1080ti", "titanx", "titanxp"),
    "volta": ("v100", "v100s", "gv100", "titanv"),
    "turing": ("t4", "t40", "2080", "2080ti", "rtx6000", "rtx8000", "titanrtx"),
    "ampere": ("a2", "a10", "a10g", "a16", "a30", "a40", "a100", "a800", "a4000", "a5000", "a6000", "3090", "3090ti"),
    "ada": ("l4", "l20", "l40", "l40s", "4090", "ada"),
    "hopper": ("h20", "h100", "h200", "h800", "gh200"),
    "blackwell": ("b100", "b200", "b300", "gb200", "gb300", "5090"),
}
_BY_MODEL = {model: family for family, models in _MODELS.items() for model in models}
_SLICE = re.compile(r"(?:\A|[^a-z0-9])(?:mig|\d+g[._-]\d+gb)(?:\Z|[^a-z0-9])", re.IGNORECASE)
"""A profile of a Multi-Instance GPU, such as 1g.5gb, a100_3g.20gb, mig-1g.10gb+me."""


def is_slice(kind: str) -> bool:
    """Return whether a GPU type is a slice of a GPU (MIG)."""
    return _SLICE.search(kind) is not None


def generation_of(text: str) -> str | None:
    """Return the generation of a GPU model, or of a name that contains a model; None if there is none."""
    words = [word for word in re.split(r"[^a-z0-9]+", text.lower()) if word]
    for family in FAMILIES:
        if family in words:
            return family
    pairs = [first + second for first, second in pairwise(words)]
    bare = [re.sub(r"^(gtx|rtx|tesla|gpu)", "", word) for word in words]
    return next((_BY_MODEL[word] for word in (*pairs, *words, *bare) if word in _BY_MODEL), None)
