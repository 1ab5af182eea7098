"""What runs on a GPU host: standard library and pynvml only, sent over SSH, installed nowhere."""
