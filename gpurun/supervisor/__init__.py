"""The life of one job, step by step: one process for each running gang.

life                          the steps as a table: begin here
prepare, data, preflight      PREPARING: what hosts need, and whether they can train
start, rehearsal              STARTING: containers, the job's sshd, rank 0's launcher
watch, decide, gang_seen      RUNNING: what threads see, and the pure choice of the next step
causes, verdicts, ends        why an attempt ended: decided once, and kept
stop, fence, ending, lost     STOPPING: end the ranks, copy outputs, prove that GPUs are free
outputs…                      the job's outputs on hosts and on the head
elastic, grows_anew           gangs that change while they run
log…, ranks, rank_places      what ranks print and report
"""
