"""What every attempt of every job used and how it ended: kept for ever, counted, and shown."""
