"""Exports of an inventory for other tools: one module per format."""
