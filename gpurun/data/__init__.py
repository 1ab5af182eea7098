"""Data sets: pinned by their digest at submit, brought to the hosts once per content, shared by jobs."""
