"""Metrics as the text that Prometheus reads: its exposition format 0.0.4. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpurun.documents.plain import printable

MOST_LABEL_CHARS = 300


@dataclass
class MetricFamily:
    """One metric with all its samples.

    Attributes:
        name: with the unit, and ``_total`` for a counter.
        samples: label values, in the order of `labels` → value.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()
    samples: dict[tuple[str, ...], float] = field(default_factory=dict)

    def add(self, value: float, *labels: str) -> None:
        """Add to the sample with these label values."""
        assert len(labels) == len(self.labels)
        self.samples[labels] = self.samples.get(labels, 0.0) + value


def exposition(families: Iterable[MetricFamily]) -> str:
    """The whole text. A family without samples is left out."""
    lines: list[str] = []
    for family in families:
        if family.samples:
            lines += [f"# HELP {family.name} {_help(family.help)}", f"# TYPE {family.name} {family.kind}"]
            for values, value in sorted(family.samples.items()):
                lines.append(f"{family.name}{_labels(dict(zip(family.labels, values, strict=True)))} {_number(value)}")
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_value(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _value(text: str) -> str:
    """A label's value: what could steer a terminal made visible, then what the format escapes."""
    return printable(text[:MOST_LABEL_CHARS]).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
