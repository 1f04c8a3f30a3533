"""Fine-tunes a model to say one sequence by heart, over gRPC, without the tinker SDK.

    TINSMITH_GRPC=127.0.0.1:8001 TINKER_API_KEY=tml-... python examples/python/train.py

TINSMITH_STATE names a file in which a run leaves its session and model until it is done. Started again with
it, a run that was killed goes on after its last request.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tinsmith_client import Client, Model, Session, datum

STEPS = 6
SEQUENCE = [(37 * i + 11) % 200 for i in range(24)]


def base_model(client: Client, minutes: float = 15) -> str:
    """A base model that can be trained and sampled; while there is none, says what it waits for."""
    end = time.monotonic() + 60 * minutes
    said = False
    while time.monotonic() < end:
        for model in client.server_info().models:
            if model.trainable and model.sampleable and model.architecture:
                return model.name
        if not said:
            print("waiting for a base model with a trainer and a sampler", flush=True)
            said = True
        time.sleep(1)
    sys.exit(f"no base model after {minutes:g} minutes; tinsmith status says what the cluster is doing")


def begin(client: Client, state: Path | None) -> tuple[Session, Model]:
    """The session and the model of an earlier run, or new ones."""
    if state is not None and state.exists():
        kept = json.loads(state.read_text())
        session = client.open_session(kept["session"])
        model = session.model(kept["model"])
        print(f"going on after request {model.last_seq_id}", flush=True)
        return session, model
    base = base_model(client)
    print(f"training {base}", flush=True)
    session = client.create_session(tags=["python"])
    model = session.create_model(base, rank=8, seed=1)
    if state is not None:
        state.write_text(json.dumps({"session": session.session_id, "model": model.model_id}))
    return session, model


def main() -> None:
    state = Path(os.environ["TINSMITH_STATE"]) if "TINSMITH_STATE" in os.environ else None
    with Client(os.environ.get("TINSMITH_GRPC", "127.0.0.1:8001"), os.environ["TINKER_API_KEY"]) as client:
        session, model = begin(client, state)
        batch = [datum(SEQUENCE[:-1], SEQUENCE[1:], weights=[1.0] * (len(SEQUENCE) - 1))]
        # Two requests a step.
        for step in range((model.last_seq_id or 0) // 2 + 1, STEPS + 1):
            work = model.forward_backward(batch)
            model.optim_step(learning_rate=0.01).result()
            print(f"step {step} loss {work.result().metrics['loss:sum']:.3f}", flush=True)
        print(f"saved {model.save_state('by-heart', overwrite=True).result().path}")
        said: list[int] = []
        for part in model.sampler().stream(SEQUENCE[:4], max_tokens=len(SEQUENCE) - 4, temperature=0):
            if part.tokens:
                said += part.tokens
                print(f"said {list(part.tokens)}", flush=True)
        right = sum(token == wanted for token, wanted in zip(said, SEQUENCE[4:], strict=False))
        print(f"said {right} of {len(SEQUENCE) - 4} tokens by heart")
        if state is not None:
            state.unlink()
        session.finish()


if __name__ == "__main__":
    main()
