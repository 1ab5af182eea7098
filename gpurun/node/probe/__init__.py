"""The probe: what this host is, as one JSON document."""
