"""Hosts, racks, generations, fabrics, pools: the model, its YAML, its editing.

model, fields        the values, and every key with its type and meaning
load, validate, locate, cache
                     from a file to the model
hostset, folding     sets of hosts in ClusterShell's syntax
change, edit, check, merge, write
                     one change of the file: small, checked, recorded
roundtrip, rows, slices, tree
                     the user's YAML with its comments
leased, history      what running jobs forbid, and what was changed when
imports, exports     other tools' lists of hosts
"""
