"""Says what vLLM makes of a sampler's settings on an H100, without one; a program of its own, as a process of
vLLM takes one platform.

vLLM's own platform for CUDA decides; of the device it is told what it would ask it. Where vLLM looks for what
it has compiled for GPUs there are empty modules. Nothing is loaded, and nothing computed.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

_COMPILED = (
    *("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"),
    *("vllm.vllm_flash_attn._vllm_fa2_C", "vllm.vllm_flash_attn._vllm_fa3_C"),
)


def _take_an_h100() -> None:
    for name in _COMPILED:
        sys.modules[name] = types.ModuleType(name)
    from vllm import platforms
    from vllm.config import vllm as config
    from vllm.platforms import cuda, interface

    class H100(cuda.CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return interface.DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

    platforms._current_platform = H100()
    # A GPU's build of vLLM brings Triton.
    config.HAS_TRITON = True


def main(model: str, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What vLLM decides for each of these settings.

    Args:
        model: a model's directory.
        asked: each in place of some defaults.
    """
    _take_an_h100()
    from vllm.envs import disable_envs_cache
    from vllm.usage.usage_lib import UsageContext

    from services.sampler.config import SamplerConfig, device_environment, engine_environment
    from services.sampler.engine.settings.arguments import checked_args

    told: list[dict[str, Any]] = []
    for settings in asked:
        wanted = SamplerConfig("sampler-0", "org/model", model, model, "redis://", **settings)
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
        os.environ.update(
            engine_environment(wanted) | device_environment(wanted, "cuda", triton=True, compiles=True)
        )
        disable_envs_cache()
        made = checked_args(wanted, "cuda").create_engine_config(UsageContext.OPENAI_API_SERVER)
        told.append(
            {
                "worker": made.parallel_config.worker_cls,
                "executor": made.parallel_config.distributed_executor_backend,
                "v2": made.use_v2_model_runner,
                "asynchronous": made.scheduler_config.async_scheduling,
                "sequences": made.scheduler_config.max_num_seqs,
                "tokens": made.scheduler_config.max_num_batched_tokens,
                "graphs": made.compilation_config.cudagraph_mode.name,
                "dtype": str(made.model_config.dtype),
                "keys": made.cache_config.cache_dtype,
                "adapters": made.lora_config.max_loras if made.lora_config else 0,
                "fits": made.model_config.original_max_model_len == -1,
                "experts": made.aux_output_config.enabled,
                "sharded": made.parallel_config.enable_batch_sharded_sampling,
            }
        )
    return told


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
