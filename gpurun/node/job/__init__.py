"""A job's part on this host: claims on GPUs, container, ranks, outputs, the fence."""
