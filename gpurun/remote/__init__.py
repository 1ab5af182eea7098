"""SSH sessions, agents on hosts, bounded fan-out."""
