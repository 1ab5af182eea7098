"""Names of what an attempt's ranks write beside their code. Pure: both sides use them."""

TARGET = "/workspace"
"""Where ranks see their code."""
CODE = "workspace"
"""In a job's folder on a host: the copy of the workdir, which no rank changes."""
PREFIX = "gpurun-layer-"


def volume_name(job: str, attempt: int) -> str:
    """Return the name of an attempt's volume; the same on every host of the gang."""
    return "%s%s-%d" % (PREFIX, job, attempt)
