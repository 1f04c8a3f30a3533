"""The sampler: one vLLM engine that serves a base model and any number of its snapshots.

    replica, service   the process from start to drain; the RPCs of gateways and trainers
    requests/          what becomes of a sample, from being taken on to its answer
    snapshots/         which weights are where, and whose turn it is
    engine/            vLLM's front end, in this process
    worker/            what runs inside vLLM's workers

A room imports only those below it; `config.py` is below all, `convert.py` (protobuf) and `wiring.py` (who is
given what) belong to the top. No other service imports this one.
"""
