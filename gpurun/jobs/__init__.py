"""Jobs: from recipe to job spec, the states of a job, the job store."""
