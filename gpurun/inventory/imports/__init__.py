"""Imports of other tools' lists of hosts: one module per format; each fills a Draft."""
