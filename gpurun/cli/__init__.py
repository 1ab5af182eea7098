"""Parse, call, render; one file per command group."""
