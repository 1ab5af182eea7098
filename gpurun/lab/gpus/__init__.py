"""GPU stand-ins: replacements for NVML and the NVIDIA container toolkit on a host without GPUs."""
