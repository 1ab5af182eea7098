"""Commands in this process."""

from __future__ import annotations

import pytest

from gpurun.cli.main import main


@pytest.fixture
def gpurun(capsys):
    """Run a command; its exit code, and what it printed on stdout and stderr."""

    def run(*argv):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return ended.value.code, out, err

    return run
