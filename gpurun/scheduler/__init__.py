"""Pure: snapshot in, decisions out. Placement, queue order, pools, backfill, preemption, explanation."""
