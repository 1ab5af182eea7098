"""The state directory: durable writes, locks, users, the audit log, cordons.

paths                names below the directory, and the only way to open them
durable              files and folders that are complete or absent after a crash; lines that are appended
locks, filesystem    the one kind of lock
sharing              several users
audit, hosts         who did what; hosts that get no new gangs
caches               caches of the user: slow to compute, safe to lose
boot, clock          time within a boot, and across
"""
