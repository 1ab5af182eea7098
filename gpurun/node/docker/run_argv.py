"""Read a plan's ``docker run`` argv, and keep values of variables out of the host's process list.

Every user of a host can read the arguments of a process; only its own account can read its environment.
"""

from typing import Dict, List, Tuple

_OF_THE_CLIENT = frozenset(
    (
        "HOME", "PATH", "GLIBC_TUNABLES", "GODEBUG", "GOGC", "GOMAXPROCS", "GOMEMLIMIT", "GOTRACEBACK",
        "DOCKER_API_VERSION", "DOCKER_CERT_PATH", "DOCKER_CONFIG", "DOCKER_CONTENT_TRUST",
        "DOCKER_CONTENT_TRUST_SERVER", "DOCKER_CONTEXT", "DOCKER_CUSTOM_HEADERS", "DOCKER_DEFAULT_PLATFORM",
        "DOCKER_HOST", "DOCKER_TLS", "DOCKER_TLS_VERIFY",
    )
)  # fmt: skip
"""Docker's client, Go and the loader read these variables themselves: a job's values would change the client. They are
no secrets (docs.docker.com, "docker", "Environment variables"; pkg.go.dev/runtime). So are all that begin with ``LD_``.
"""


def container_name(run: List[str]) -> str:
    """Return the name that the argv gives to its container."""
    return run[run.index("--name") + 1]


def create_argv(run: List[str]) -> Tuple[List[str], Dict[str, str]]:
    """Return the ``docker create`` argv without the values of variables, and the environment to run it in.

    Docker's client takes the value of ``--env NAME`` from its own environment. The words after ``--entrypoint`` are the
    job's command, and stay as they are.
    """
    end = run.index("--entrypoint") if "--entrypoint" in run else len(run)
    argv, values = ["docker", "create"], {}  # type: List[str], Dict[str, str]
    options = iter(run[3:end])
    for word in options:
        argv.append(word)
        if word == "--env":
            setting = next(options)
            name, separator, value = setting.partition("=")
            if not separator or name in _OF_THE_CLIENT or name.startswith("LD_"):
                argv.append(setting)
            else:
                argv.append(name)
                values[name] = value
    return [*argv, *run[end:]], values
