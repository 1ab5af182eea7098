"""For a shell script that stands in for horovodrun in an image."""

from gpurun.launch.rank import RANK_SCRIPT

TAKE_COMMAND = f"""eval "set -- $(sed -n '2s/.*|| set -- //p' {RANK_SCRIPT})"
"""
"""The command of the ranks becomes the script's own words: it is in the ranks' script, not in the launcher's argv."""
