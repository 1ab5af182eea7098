"""An inventory as other tools want it: one module a format."""
