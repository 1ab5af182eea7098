"""The cluster in a browser, read-only: `page` writes HTML, and `pages` answers those whom `gpurun.loopback` lets in."""
