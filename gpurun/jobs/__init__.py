"""Jobs: from recipe to job spec, the states of a job, the job store.

recipe, recipe_keys, recipe_values
                     YAML and flags, read and checked
spec, mounted, environment
                     what a person asked for, as frozen values
record, states       what became of it, and which changes are allowed
store, folder, drafts
                     the job store: one folder for each job
live, index          the jobs that have not ended, quickly
attempts, events, gpu_use
                     what each attempt left for people and the history
"""
