"""Hosts, racks, generations, fabrics, pools: the model, its YAML, its editing."""
