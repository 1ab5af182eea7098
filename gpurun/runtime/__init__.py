"""Modules that user code can import inside its container."""
