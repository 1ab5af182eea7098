"""The history: what every attempt of every job used and how it ended. Kept for ever."""
