"""The line of a recipe that an error is about: ``recipe.yaml:4:15``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from yaml.nodes import Node

from gpurun.documents.nodes import place_of
from gpurun.documents.problems import DocumentError, Problem
from gpurun.errors import BadInput
from gpurun.jobs.disagreement import Disagreement


@dataclass(frozen=True)
class RecipeLines:
    """The lines of a recipe's keys.

    Attributes:
        root: the recipe's YAML; None = the job has no recipe.
        flags: settings that flags give, with their values: the recipe does not decide these.
    """

    file: str = ""
    root: Node | None = None
    flags: Mapping[str, object] = field(default_factory=dict)

    @contextmanager
    def named(self, *otherwise: str) -> Iterator[None]:
        """Name the line of its key in each BadInput that is raised within.

        Args:
            otherwise: the key of errors that name no key, or a key that the recipe lacks.
        """
        try:
            yield
        except BadInput as error:
            found = self.at_line(error, *otherwise)
            if found is error:
                raise
            raise found from error

    def at_line(self, error: BadInput, *otherwise: str) -> BadInput:
        """Return the error with the line of its key; the error itself if the recipe does not decide that key."""
        if isinstance(error, DocumentError):
            return error
        for key in filter(None, (error.key if isinstance(error, Disagreement) else (), otherwise)):
            if self._is_of_flags(key):
                break
            if place := place_of(self.root, key):
                return DocumentError([Problem(self.file, *place, str(error))], hint=error.hint)
        return error

    def _is_of_flags(self, key: tuple[str, ...]) -> bool:
        given = self.flags.get(key[-1] if key[0] == "constraints" else key[0])
        if isinstance(given, Mapping):
            return key[-1] in given or place_of(self.root, key) is None
        return given is not None
