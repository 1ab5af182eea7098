"""gpurun: gang-scheduled distributed training on bare-metal GPU hosts, over SSH."""

__version__ = "0.1.0"
