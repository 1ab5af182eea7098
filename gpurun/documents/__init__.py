"""Read YAML documents that people write into checked values. Every problem has its line and column."""
