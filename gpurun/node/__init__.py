"""Code that runs on a GPU host: needs the standard library and pynvml only, is sent over SSH, and is not installed."""
