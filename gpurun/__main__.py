"""``python -m gpurun``."""

from gpurun.cli.main import main

main()
