"""The state directory: durable writes, locks, users, the audit log, cordons.

path, home           names below the directory, and the only way to open them
durable, growing, drafts, syncing
                     files and folders that are complete or absent after a crash; lines that are appended
lock, change_lock, own_lock, filesystem
                     the one kind of lock
shared, people, identity, trusted
                     several users
audit, cordons       who did what; hosts that get no new gangs
own_cache, data_sites
                     caches of the user: slow to compute, safe to lose
"""
