"""Work of the head for all jobs: submit, run passes, start supervisors, adopt, wait, recover by a timer.

submit               from a wish to stored jobs, a pass, a waiter; or to what a submit would do
spawn, waiter, caretaker
                     processes that start and replace supervisors; cancel, requeue
children, loading    how such a process starts, with all of its code
looks, looking       hosts are looked at, also without a job
claims               root's care for jobs of all users
prune                remove what has ended
"""
