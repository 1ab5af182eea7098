"""What the head does for all jobs: submit them, run passes, start supervisors, adopt, wait, and be woken by a timer."""
