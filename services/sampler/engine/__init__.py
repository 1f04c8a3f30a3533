"""vLLM's front end: an engine that is asked in plain data and answers in plain data.

Invariant: nothing outside this room and `worker` knows vLLM. What leaves here is whole: every sampled token
has a log-probability and every sequence a reason why it ended.

Imported by the rooms requests and snapshots, the service and the wiring; imports the room worker.
"""
