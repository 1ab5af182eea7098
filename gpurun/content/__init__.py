"""Images, code, data sets and environments: bytes that gpurun copies to hosts."""
