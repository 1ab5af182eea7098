"""Messages to people and programs when a job starts, ends, fails or is preempted."""
