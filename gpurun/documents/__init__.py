"""YAML documents that people write, as checked values: nodes with places, one converter, problems with places."""
