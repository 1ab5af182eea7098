"""Random inventories as people write them, each line tagged with the hosts it is about."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from gpurun.inventory.folding import fold
from gpurun.inventory.hostset import expand

FIELDS = ("gpus: 8", "generation: volta", "port: 2222", "user: bob", "labels: {team: nlp}", "gpu_memory_mib: 32GiB")


@dataclass
class Written:
    """A generated file: its lines, and for each the hosts whose change may change it."""

    lines: list[str] = field(default_factory=list)
    about: list[frozenset[str]] = field(default_factory=list)
    racks: dict[str, set[int]] = field(default_factory=dict)  # rack → lines that grow when hosts are added
    commas: dict[int, list[frozenset[str]]] = field(default_factory=dict)  # line → what stands behind its comma
    newline: str = "\n"

    def add(self, line: str, about: frozenset[str] = frozenset()) -> None:
        self.lines.append(line)
        self.about.append(about)

    @property
    def text(self) -> str:
        return "".join(line + self.newline for line in self.lines)


class _Writer:
    """Draws one style decision after the other, and writes."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.out = Written(newline=draw(st.sampled_from(["\n", "\n", "\n", "\r\n"])))
        self.step = draw(st.sampled_from([2, 2, 4, 3]))
        self.comments = 0
        self.anchor: str | None = None  # of an entry, and the hosts of that entry
        self.anchored: frozenset[str] = frozenset()
        self.ranges = 0

    def chance(self, of: int = 2) -> bool:
        return self.draw(st.integers(0, of - 1)) == 0

    def tail(self) -> str:
        """A comment behind a value."""
        self.comments += 1
        return f"{' ' * self.draw(st.integers(1, 4))}# note {self.comments}: a 'b' {{c}}" if self.chance(3) else ""

    def aside(self, column: int) -> None:
        """Perhaps comment lines and empty lines."""
        if self.chance(3):
            self.comments += 1
            self.out.add(f'{" " * column}# remark {self.comments}: [x], "y"')
        if self.chance(6):
            self.out.add("")

    def key(self, names: tuple[str, ...], flow: bool) -> str:
        text = fold(names)
        styles = ['"{}"', "'{}'"] + ([] if flow and ("[" in text or "," in text) else ["{}"])
        return self.draw(st.sampled_from(styles)).format(text)

    def values(self) -> list[str]:
        return self.draw(st.lists(st.sampled_from(FIELDS), unique=True, max_size=3))

    def flow_value(self, names: tuple[str, ...], anchors: bool) -> str:
        values = self.values()
        if len(names) > 1 and self.chance(5):
            self.ranges += 1  # two hosts of one address would be one machine
            values.append(f'address: "10.0.{self.ranges}.[1-{len(names)}]"')
        if anchors and self.chance(5):
            values.insert(0, "<<: *base")
        if anchors and self.chance(6):
            return "*base"
        if not values and self.chance():
            return self.draw(st.sampled_from(["{}", "{ }", ""]))
        pad = self.draw(st.sampled_from(["", " "]))
        return "{" + pad + self.draw(st.sampled_from([", ", ",  "])).join(values) + pad + "}"

    def rack(self, rack: str, entries: list[tuple[str, ...]], anchors: bool) -> None:
        out, column = self.out, self.step
        self.aside(column)
        style = self.draw(st.sampled_from(["line", "lines", "block", "block"]))
        everyone = frozenset(name for names in entries for name in names)
        if style == "line":
            inside = ", ".join(f"{self.key(n, True)}: {self.flow_value(n, anchors)}" for n in entries)
            out.racks[rack] = {len(out.lines)}
            out.add(f"{' ' * column}{rack}: {{hosts: {{{inside}}}}}{self.tail()}", everyone)
        elif style == "lines":
            start = f"{' ' * column}{rack}: {{hosts: {{"
            last_comma = self.chance()
            for at, names in enumerate(entries):
                last = at == len(entries) - 1
                if at:
                    self.aside(len(start))
                out.commas[len(out.lines)] = [frozenset(other) for other in entries[at + 1 :]]
                lead = start if at == 0 else " " * len(start)
                end = "," if not last or last_comma else "}}"
                out.racks[rack] = {len(out.lines)}
                value = self.flow_value(names, anchors)
                out.add(f"{lead}{self.key(names, True)}: {value}{end}{self.tail()}", frozenset(names))
            if last_comma:
                out.commas[len(out.lines)] = [frozenset(other) for other in entries]
                out.add(f"{' ' * column}}}}}{self.tail()}")
        else:
            out.add(f"{' ' * column}{rack}:{self.tail()}")
            self.aside(column * 2)
            out.add(f"{' ' * column * 2}hosts:{self.tail()}")
            for names in entries:
                self.entry(names, column * 3, anchors)
            out.racks[rack] = set()

    def entry(self, names: tuple[str, ...], column: int, anchors: bool) -> None:
        self.aside(column)
        about, values = frozenset(names), self.values()
        if anchors and self.chance(4):
            self.anchored_entry(names, column)
        elif values and self.chance():
            self.out.add(f"{' ' * column}{self.key(names, False)}:{self.tail()}", about)
            for value in values:
                self.out.add(f"{' ' * (column + self.step)}{value}{self.tail()}", about)
        else:
            value = self.flow_value(names, anchors)
            self.out.add(f"{' ' * column}{self.key(names, False)}: {value}{self.tail()}", about)

    def anchored_entry(self, names: tuple[str, ...], column: int) -> None:
        """An entry that others are aliases of, or one of those: a change of the first may move the anchor."""
        start = f"{' ' * column}{self.key(names, False)}:"
        if self.anchor is None:
            self.anchor, self.anchored = f"e{len(self.out.lines)}", frozenset(names)
            self.out.add(f"{start} &{self.anchor} {{gpus: 2,  labels: {{row: b}}}}{self.tail()}", self.anchored)
            return
        value = self.draw(st.sampled_from([f"*{self.anchor}", f"{{<<: *{self.anchor}, port: 22}}"]))
        self.out.add(f"{start} {value}{self.tail()}", frozenset(names) | self.anchored)


@st.composite
def inventories(draw: st.DrawFn) -> Written:
    """A valid inventory in a random hand."""
    writer = _Writer(draw)
    out = writer.out
    writer.aside(0)
    if writer.chance(4):
        out.add("---")
    out.add(f"version: 1{writer.tail()}")
    anchors = writer.chance()
    if anchors:
        out.add(f"x-base: &base {{gpus: 8, labels: {{row: a}}}}{writer.tail()}")
    out.add(f"defaults: {{user: train,  generation: pascal, gpus: 4, fabric: tcp}}{writer.tail()}")
    writer.aside(0)
    out.add(f"fabrics:{writer.tail()}")
    out.add(f"{' ' * writer.step}tcp:   {{ kind: tcp, interface: eno1 }}{writer.tail()}")
    out.add(f"racks:{writer.tail()}")
    for rack in range(draw(st.integers(1, 3))):
        entries, first = [], 1
        for _ in range(draw(st.integers(1, 4))):
            count = draw(st.sampled_from([1, 1, 2, 5, 8]))
            entries.append(expand(f"gpu-r{rack}-[{first:02}-{first + count - 1:02}]"))
            first += count
        writer.rack(f"r{rack}", entries, anchors)
    writer.aside(0)
    if writer.chance():
        out.add(f"pools:{writer.tail()}")
        out.add(f"{' ' * writer.step}vision: {{reservation: 0,   limit: 8}}{writer.tail()}")
        writer.aside(0)
    return out
