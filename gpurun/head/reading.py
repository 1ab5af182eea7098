"""Read a job's program at submit, for what it says of its launcher. Nothing of it is executed."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path, PurePosixPath

from gpurun.errors import BadInput
from gpurun.inventory.load import read
from gpurun.jobs.spec import JobSpec
from gpurun.launch.launchers.choosing.choice import ProgramClues
from gpurun.launch.launchers.choosing.programs import StartedProgram, programs_in, programs_of
from gpurun.launch.launchers.choosing.sources import ASKED, Clue, command_clue, name_clues, read_source
from gpurun.launch.launchers.lines.batch import directives_of
from gpurun.launch.launchers.lines.line import read_line
from gpurun.launch.launchers.lines.script import ScriptLaunch, launches_in

MOST_FILES, MOST_BYTES, MOST_BYTES_IN_ALL = 100, 1 << 20, 2 << 20
MOST_FOLDERS = 8
WORKSPACE = PurePosixPath("/workspace")
COMMAND = "the command"


def clues_of(spec: JobSpec) -> ProgramClues:
    """Return what the program of a job says: its command, its script, and the modules beside the script.

    Reads at most `MOST_FILES` regular files of the workdir.
    """
    return ProgramReading(None if spec.workdir is None else Path(spec.workdir)).of_command(spec.command)


def script_clues_of(spec: JobSpec) -> ProgramClues:
    """Return what the shell script says that each rank runs; nothing, without one. Reads no Python."""
    programs = [each for each in programs_of(spec.command) if each.kind == "shell" or "/" in each.what]
    reading = ProgramReading(None if spec.workdir is None else Path(spec.workdir), is_python_read=False)
    reading.take([each for each in programs if each.kind in ("shell", "program")], COMMAND)
    return reading.result()


def clues_in(text: str, shown: str, folder: Path | None, names: Iterable[str] = ()) -> ProgramClues:
    """Return what Python source says, with the modules in `folder`.

    Args:
        shown: the name of the source for people.
        names: dotted names of what the program has already imported.
    """
    reading = ProgramReading(folder)
    reading.note(name_clues(list(names)), shown)
    reading.python(text, shown, folder)
    return reading.result()


class ProgramReading:
    """The files of one program, read."""

    def __init__(self, workdir: Path | None, *, is_python_read: bool = True) -> None:
        self._workdir, self._is_python_read = workdir, is_python_read
        self._real = None if workdir is None else Path(os.path.realpath(workdir))
        self._clues: dict[Clue, str] = {}
        self._left, self._seen = MOST_BYTES_IN_ALL, set[Path]()
        self._launches: tuple[ScriptLaunch, ...] = ()
        self._starts = self._unread = self._unknown = ""
        self._looked: list[str] = []
        self._directives: tuple[tuple[tuple[str, str], ...], str] = ((), "")
        self._trains = self._by_srun = False

    def of_command(self, command: tuple[str, ...]) -> ProgramClues:
        """Return what a command says."""
        line = read_line(command)
        self._by_srun = line.by_srun
        self.take(programs_of(line.whole), COMMAND)
        if ("--launcher", "pytorch") in pairwise(command):
            self.note([ASKED], COMMAND)
        return self.result()

    def result(self) -> ProgramClues:
        """Return what was found so far."""
        is_harmless = not (self._trains or self._clues or self._launches)
        looked = ", ".join(self._looked[:3])
        return ProgramClues(
            self._clues, is_harmless, self._launches, self._starts, self._unread, looked, *self._directives,
            unknown=self._unknown,
        )  # fmt: skip

    def note(self, clues: Iterable[Clue], where: str) -> None:
        """Note clues of one place, unless they are known."""
        for clue in clues:
            self._clues.setdefault(clue, where)

    def python(self, data: bytes | str, shown: str, folder: Path | None, package: Path | None = None) -> None:
        """Note what Python source says, and the modules that it imports.

        Args:
            folder: where its absolute imports begin.
            package: where its relative imports begin, if it has some.
        """
        self._trains = True
        self._looked.append(shown)
        if not self._is_python_read:
            return
        source = read_source(data)
        if source.damage:
            self._cannot(f"gpurun cannot read {shown}: {source.damage}")
        waiting = deque([(source, shown, package or folder)])
        while waiting:
            source, shown, beside = waiting.popleft()
            for clue, line in source.clues.items():
                self.note([clue], shown if shown == COMMAND else f"{shown} line {line}")
            for level, name in source.imports:
                top = folder if level == 0 or beside is None else beside.joinpath(*[".."] * (level - 1))
                for module in self._modules(name, top):
                    if (found := self._data(module)) is not None:
                        waiting.append((read_source(found), self._shown(module), module.parent))

    def take(self, programs: Iterable[StartedProgram], shown: str) -> None:
        """Note what programs say that one text starts."""
        for each in programs:
            if each.kind == "launcher":
                self._cannot(f"gpurun cannot read how {shown} starts {each.what}")
            elif each.kind == "source":
                self.python(each.what, shown, self._workdir)
            elif each.kind == "module":
                self._module(each)
            elif each.kind == "unread":
                self._cannot(f"gpurun cannot read which program {each.what} runs")
            elif each.kind != "harmless":
                self._file(each, shown)

    def _module(self, program: StartedProgram) -> None:
        name, top = program.what, self._in_workdir(program.folder or ".")
        self.note(name_clues([name]), COMMAND)
        for path in self._modules(name, top or self._workdir, is_main=True):
            if self._is_read(path):
                return
            if (data := self._data(path)) is not None:
                self.python(data, self._shown(path), top or self._workdir, path.parent)
                return
        if not self._clues:
            self._cannot(f"gpurun does not find the module {name} {self._where}")

    def _file(self, program: StartedProgram, shown: str) -> None:
        if (found := self._found(program)) is None:
            return
        path, data = found
        kind, first = program.kind, b"" if data is None else data[:200].partition(b"\n")[0]
        if kind == "program" and first.startswith(b"#!"):
            kind = "python" if b"python" in first else "shell" if b"sh" in first else kind
        if path is None or data is None or kind == "program" or (kind == "shell" and b"\0" in data):
            if kind == "program" and data is None and (clue := command_clue(PurePosixPath(program.what).name)):
                self.note([clue], shown)
            elif kind == "program" and not program.in_shell:
                self._cannot(f"gpurun does not know what {program.what} does")
                self._unknown = self._unknown or program.what
            elif kind != "program":
                self._cannot(f"gpurun cannot read {program.what} {self._where}")
        elif kind == "python":
            self.python(data, self._shown(path), path.parent)
        else:
            shown, text = self._shown(path), data.decode(errors="replace")
            self._looked.append(shown)
            if not self._directives[0]:
                self._directives = (directives_of(text), shown)
            if launches := launches_in(text, program.arguments, by_srun=self._by_srun):
                self._launches, self._starts = (*self._launches, *launches), self._starts or shown
            self.take(programs_in(text, program.folder), shown)

    def _found(self, program: StartedProgram) -> tuple[Path | None, bytes | None] | None:
        """Return the file of a program, and its content if it can be read; None if it was read before.

        A ``cd`` in brackets ends with them, which words do not show: the folder's last parts may be the whole.
        """
        parts = PurePosixPath(program.folder).parts[-MOST_FOLDERS:]
        folders = [program.folder, *("/".join(parts[at:]) for at in range(1, len(parts) + 1))]
        for folder in folders:
            path = self._in_workdir(str(PurePosixPath(folder) / program.what))
            if path is not None and self._is_read(path):
                return None
            if path is not None and (data := self._data(path)) is not None:
                return path, data
        return self._in_workdir(program.what), None

    def _is_read(self, path: Path) -> bool:
        return Path(os.path.realpath(path)) in self._seen

    def _cannot(self, why: str) -> None:
        self._trains, self._unread = True, self._unread or why

    @property
    def _where(self) -> str:
        return "in the workdir" if self._workdir is not None else "(the job has no workdir)"

    def _modules(self, name: str, top: Path | None, *, is_main: bool = False) -> list[Path]:
        """Return the files that an import may mean, those of the packages around a module included."""
        parts, found = name.split(".") if name else [], list[Path]()
        if self._workdir is None or top is None or not all(part.isidentifier() for part in parts):
            return []
        for folder in dict.fromkeys((top, self._workdir)):
            for size in range(len(parts), 0, -1):
                base = folder.joinpath(*parts[:size])
                found += [base.with_name(f"{base.name}.py"), base / ("__main__.py" if is_main else "__init__.py")]
                if is_main:
                    break
        return found

    def _in_workdir(self, name: str) -> Path | None:
        """Return the file that a path of the container means; None if it is not of the workdir."""
        path = PurePosixPath(name)
        if self._workdir is None or "\0" in name or not name:
            return None
        if path.is_absolute() and not path.is_relative_to(WORKSPACE):
            return None
        return self._workdir / (path.relative_to(WORKSPACE) if path.is_absolute() else path)

    def _data(self, path: Path) -> bytes | None:
        """Return the content of a regular file of the workdir; None if it is not one, too large, or read before."""
        try:
            real = Path(os.path.realpath(path))
            is_there = self._real is not None and real.is_relative_to(self._real) and real.is_file()
        except (OSError, ValueError):
            return None
        most = min(MOST_BYTES, self._left)
        if not is_there or real in self._seen or len(self._seen) >= MOST_FILES or most <= 0:
            return None
        self._seen.add(real)
        try:
            data = read(real, "the program", most_bytes=most)
        except BadInput:
            return None
        self._left -= min(len(data), most)
        return data if len(data) <= most else None

    def _shown(self, path: Path) -> str:
        return os.path.relpath(path, self._workdir) if self._workdir is not None else str(path)
