"""Pure: a placed job becomes one frozen plan of argvs, files and settings."""
