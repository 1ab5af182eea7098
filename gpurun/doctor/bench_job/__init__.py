"""The program that `gpurun bench` sends to its gang: `bench.py` runs in the containers, never on the head."""
