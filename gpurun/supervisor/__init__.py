"""The life of one job, step by step: one process for each running gang.

life                 the steps as a table: begin here
start                PREPARING, STARTING: what hosts need, whether they can train; containers, sshd, launcher
watch, health        RUNNING: what threads see
verdict              the pure choice of the next step; why an attempt ended: decided once, and kept
stop                 STOPPING: end the ranks, copy outputs, prove that GPUs are free
outputs              the job's outputs on hosts and on the head
elastic              gangs that change while they run
lines, log, log_copy, ranks
                     what ranks print and report
job, hosts, links    the job's record, hosts and agents
"""
