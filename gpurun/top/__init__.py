"""The cluster live in a terminal.

`feed` reads and samples in the background, `rows` says what is shown, and `app` draws it. `app` is the one file that
imports Textual, which is an extra. `plain` prints lines instead, for screen readers.
"""
