"""A side of the measurement in a process of its own: `python -m bench.gpu.worker SIDE SHAPE DEVICE SCRATCH`.

What one side does to a device, be it an error after which nothing runs there, ends with its process.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.child import answer_jobs

Answer = dict[str, Any]


def main(side: str, shape: str, device: str, scratch: Path) -> Callable[[Any], Answer]:
    """What answers this side's jobs: "train", "step", "prefix" and "errors", with their arguments."""
    import torch

    from bench.gpu.shapes import SHAPES

    jobs: dict[str, Callable[..., Any]]
    if side == "ours":
        from bench.gpu.engine import OurSide

        ours = OurSide(SHAPES[shape], device, scratch)
        jobs = {"train": ours.train, "step": ours.step, "prefix": ours.prefix}
    elif side == "peft":
        from bench.gpu.yardstick import PeftSide

        jobs = {"train": PeftSide(SHAPES[shape], device, scratch).train}
    else:
        from bench.gpu import exactness

        directory = exactness.model_for(device, scratch / "model")
        vocab = 4096 if device == "cuda" else 512
        jobs = {"errors": lambda dtype: exactness.errors(directory, device, dtype, vocab)}

    def answer(job: Any) -> Answer:
        name = job.pop("job")
        try:
            return dict(jobs[name](**job))
        except torch.OutOfMemoryError:
            # The error holds what the pass had computed until here.
            failed = "out of memory"
        except Exception as error:
            traceback.print_exc()
            failed = f"{type(error).__name__}: {error}".partition("\n")[0]
        if device == "cuda":
            torch.cuda.empty_cache()
        return {"failed": failed}

    return answer


if __name__ == "__main__":
    answer_jobs(lambda: main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])))
