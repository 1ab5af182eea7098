"""Content-addressed content on its way: chunks from the head and from host to host, each verified."""
