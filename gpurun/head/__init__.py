"""Work of the head for all jobs: submit, run passes, start supervisors, adopt, wait, recover by a timer."""
