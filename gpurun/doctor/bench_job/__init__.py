"""What `gpurun bench` sends to its gang: `bench.py` runs inside the containers, never on the head."""
