"""Data sets: pinned by their digest at submit, copied to hosts once for each content, shared by jobs."""
