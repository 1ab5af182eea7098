"""The cluster's state and history for Prometheus."""
