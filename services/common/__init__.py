"""What gateway, trainer and sampler share: ids, Redis, errors, the gRPC shell, the weight wire.

Nothing here imports torch, vLLM or DeepSpeed except `weights`, so the gateway stays light.
"""
