"""GPUs of this host: NVML, who holds a GPU, and the rules of claims on GPUs."""
