"""The live view of a cluster in a terminal.

`feed` reads and samples in the background, `rows` computes the rows, and `app` draws them. Only `app` imports Textual,
which is an extra. `plain` prints lines instead, for screen readers.
"""
