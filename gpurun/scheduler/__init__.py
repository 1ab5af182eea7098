"""Pure: snapshot in, decisions out. Placement, queue order, pools, backfill, preemption, explanation.

schedule, starting, waiting
                     a pass, and what it does with one gang
model, gangs, policy what goes in and comes out
placement, fit, gpus, racks, index, capacity
                     exact best fit: hosts, then GPUs of each host
pools, book          the shares of pools
future, patience, keeping, room
                     when GPUs become free, and for whom they are kept
preempt, drain, growth
                     gangs that stop, move or grow
explain, changes, wording
                     `gpurun why`
"""
