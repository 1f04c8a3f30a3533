"""Trains every model of the release for some steps, and samples it. Ends with status 1 when one does not learn."""

import json
import os
from pathlib import Path

AUTHORITY = Path("/etc/tinsmith-tls/ca.crt")
if AUTHORITY.exists():
    os.environ["SSL_CERT_FILE"] = str(AUTHORITY)
os.environ["TINKER_API_KEY"] = os.environ["API_KEYS"].split()[0]

import tinker
from tinker import types

TOKENS = list(range(20, 40))

service = tinker.ServiceClient()
for model in json.loads(os.environ["MODELS"]):
    training = service.create_lora_training_client(model["name"], rank=8).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
    )
    losses = []
    for step in range(int(os.environ["STEPS"])):
        passed = training.forward_backward([datum], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
        print(f"{model['name']}: step {step}: loss {losses[-1]:.4f}", flush=True)
    if not losses[-1] < losses[0]:
        raise SystemExit(f"{model['name']}: the loss did not fall: {losses}")
    if model["sampled"]:
        sampling = training.save_weights_and_get_sampling_client().result()
        prompt, params = types.ModelInput.from_ints(TOKENS[:4]), types.SamplingParams(max_tokens=4, temperature=0)
        answer = sampling.sample(prompt, num_samples=1, sampling_params=params).result()
        print(f"{model['name']}: sampled {answer.sequences[0].tokens}", flush=True)
print("passed")
