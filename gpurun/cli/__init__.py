"""The command line: parse, call, render. One file for each group of commands, named like it.

main, lazy           the program; a command's module is imported when it runs
options, agreement   options and questions that commands share
jobs, inventory_options
                     find the jobs, hosts and files that a person named
printing, tables, progress, patience, sending
                     output for people; JSON is in `shapes`
completion, shell_words, tree, manual
                     help for shells, pages and manuals
"""
