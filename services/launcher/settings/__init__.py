"""What `tinsmith up` can be told, by flags, a TOML file or variables of the environment, and what follows.

Invariant: a setting has one row in one table, which its flag, its help, its key in the file, its variable and
its check come from; all mistakes are told in one answer.

Imported by the command line.
"""
