"""Folders that other programs may change at any moment: read, compare, copy, create, remove."""
