"""GPU stand-ins: what NVML and the NVIDIA container toolkit say on a host that has no GPU."""
