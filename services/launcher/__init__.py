"""The `tinsmith` command: a whole cluster on one machine.

cli.py           the command line
settings/        what `tinsmith up` can be told, and what follows from it
placement.py     how many processes, and what each computes on (pure)
plan.py          which processes a cluster is made of (pure)
supervisor.py    keeps processes running
redis_server.py  the embedded Redis
up.py            `tinsmith up`, start to drain
status.py        `tinsmith status`
usage.py         what API keys have, for `tinsmith status`
doctor/          `tinsmith doctor`
default_model.py the model that is served when none is named
tiny_model.py    `tinsmith models tiny`
"""
