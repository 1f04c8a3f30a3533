"""The `tinsmith` command: a whole cluster on one machine.

cli.py           the command line
plan.py          which processes a cluster is made of (pure)
supervisor.py    keeps processes running
redis_server.py  the embedded Redis
up.py            `tinsmith up`, start to drain
status.py        `tinsmith status`
tiny_model.py    `tinsmith models tiny`
"""
