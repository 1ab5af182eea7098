"""Data sets on this host: receive, pass on, choose what to remove."""
