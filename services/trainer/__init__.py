"""The trainer: a world of DeepSpeed ranks that trains adapters and full models of one base model.

    server, service    the process from start to drain; the RPCs of gateways
    execution/         one operation, from admission to result
    publish/           weights to samplers
    files/  world/     durable state and exports; commands to all ranks
    compute/           tensors
    order/             what runs next (pure)

A room imports only those below it; `config.py` is below all, `convert.py` (protobuf) between compute and what
stands above. No other service imports this one.
"""
