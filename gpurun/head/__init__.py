"""Work of the head for all jobs: submit, run passes, start supervisors, adopt, wait, recover by a timer.

submission, wish, origin, planned
                     from a wish to stored jobs, a pass, a waiter; or to what a submit would do
spawn, waiter, caretaker
                     processes that start and replace supervisors
everybody, takeover, forged, found_claims
                     root's care for jobs of all users
requests, prune      cancel, requeue; remove what has ended
timer                `gpurun recover` at boot and every minute
"""
