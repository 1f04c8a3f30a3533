"""Log-probabilities of sampled tokens on their way from the engine's core to the front end.

vLLM sends three small arrays with each token, which take both processes longer than all else about a token.
Here those of a step go as one array: `core` makes it in the process of the engine's core, `front` gives each
output its part again. Until its sequence has ended it is `kept`.

Invariant: a token and its log-probability are in one message. What is not sure to be the sampled token's goes
by vLLM's own way, with the token that it is of, so that whoever reads it finds it out.

Imported by the engine and its room calls.
"""
