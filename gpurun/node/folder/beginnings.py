"""The beginning of a file that an interrupted copy has left: it is compared, so that the next copy sends only the rest.

Both sides digest it in the same way (`gpurun.node.folder.holes`).
"""

from typing import Any, Dict, List, NamedTuple, Optional


class Begun(NamedTuple):
    """The beginning of a file that its reader already has from an interrupted copy.

    Attributes:
        marks: the file's marks at that time.
        size: how many bytes of it are there.
        sha: their `gpurun.node.folder.holes.ContentDigest`.
    """

    marks: List[int]
    size: int
    sha: str

    def counted(self) -> bytes:
        """Return the contribution of these bytes to the digest of the whole."""
        return b"from:%d:%s;" % (self.size, self.sha.encode("ascii", "replace"))


def begun(header: Dict[str, Any]) -> Optional[Begun]:
    """Return the beginning that a file's reader says it has; None if it has none, or the header is not valid."""
    marks, size, sha = header.get("marks"), header.get("at"), header.get("sha")
    if not isinstance(marks, list) or type(size) is not int or size <= 0 or not isinstance(sha, str):
        return None
    return Begun(marks, size, sha)
