"""The agent that serves the head, and what every operation uses: its call, its frames, its folder, its processes."""
