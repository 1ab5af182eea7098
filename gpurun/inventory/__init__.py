"""Hosts, racks, generations, fabrics, pools: the model, its YAML, its editing.

model, fields        the values, and every key with its type and meaning
read, validate       from a file to the model, also from a cache
hostset, folding     sets of hosts in ClusterShell's syntax
change, edit, marks  one change of the file: small, checked, recorded; the user's YAML with its comments
imports, exports     other tools' lists of hosts
"""
