"""Other tools' lists of hosts, as inventories: one module a format, all filling a Draft."""
