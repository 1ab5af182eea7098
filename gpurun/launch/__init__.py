"""Turn a placed job into one frozen plan of argvs, files and settings. Pure."""
