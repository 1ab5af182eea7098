"""Pure: snapshot in, decisions out. Placement, queue order, pools, backfill, preemption, explanation.

passes               a pass, and what it does with one gang
model                what goes in and comes out
placement            exact best fit: hosts, then GPUs of each host
pools                the shares of pools
state                when GPUs become free, for whom they are kept, and which gangs stop
explain              `gpurun why`
"""
