"""Images of this host's Docker: look up, receive, load, record, remove."""
