"""The command line: parse, call, render. One file for each group of commands, named like it.

main                 the program; a command's module is imported when it runs
groups               the commands of `gpurun inventory`, `scale` and `sweep`
options, job_options
                     options that commands share; all options of a job
stores               the jobs, hosts and files that a person named
printing, tables, shares
                     output. The type of a command's JSON document stands above the function that makes it
completion, shell_words, foreign, manual
                     help for shells, for other tools' words, pages and manuals
"""
