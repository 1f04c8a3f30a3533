"""What gateway, trainer and sampler share: ids, errors, the gRPC shell, Redis, storage, the weight wire.

Nothing here imports torch, vLLM or DeepSpeed except `weights`, so the gateway stays light.
"""

import os

# What gRPC's core writes past our logs it writes for whoever connects: a line for each handshake that fails,
# four for a record that cannot be decrypted. It looks for this when it is imported, which is after this.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
