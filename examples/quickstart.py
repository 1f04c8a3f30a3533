"""Teaches a model one sentence. Needs TINKER_BASE_URL and TINKER_API_KEY, as `tinsmith up` prints them."""

import tinker
from tinker import types

service = tinker.ServiceClient()
name = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
print(f"training {name}, as soon as it is loaded")
model = service.create_lora_training_client(name, rank=16).result()
tokenizer = model.get_tokenizer()
ids = tokenizer.encode("A tinsmith makes things out of tinplate.")
datum = types.Datum(
    model_input=types.ModelInput.from_ints(ids[:-1]),
    loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
)
for step in range(10):
    loss = model.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"]
    model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    print(step, loss)
sampler = model.save_weights_and_get_sampling_client().result()
answer = sampler.sample(types.ModelInput.from_ints(ids[:4]), 1, types.SamplingParams(max_tokens=12)).result()
print(tokenizer.decode(answer.sequences[0].tokens))
