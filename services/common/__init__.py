"""What gateway, trainer and sampler share: ids, errors, the gRPC shell, Redis, storage, the weight wire.

Nothing here imports torch, vLLM or DeepSpeed except `weights`, so the gateway stays light.
"""
