"""Sequences that go on with other weights while they are generated, and keep their keys and values.

vLLM lets an adapter's request have this adapter to its end. A shift gives it another one between two steps,
without a new prefill: `core` does so in the process of the engine's core, where the scheduler is, and has the
workers do the same in the same step; `front` asks for it, and reads which weights made which tokens. All
weights of a model are replaced under all that runs: `full_front` pauses the engine for it, and `full_core`
gives what the scheduler has another name.

Invariant: a step computes each sequence with one set of weights, and the front end knows with which. No other
request ever finds keys and values that several sets made, or another one than the one they are cached for.

Imported by the engine; imports the room worker (how workers are told).
"""
