"""The state directory: durable writes, locks, users, the audit log, cordons."""
