"""Sequences that go on with another adapter while they are generated, and keep their keys and values.

vLLM lets an adapter's request have this adapter to its end. A shift gives it another one between two steps,
without a new prefill: `core` does so in the process of the engine's core, where the scheduler is, and has the
workers do the same in the same step; `front` asks for it, and reads which adapter made which tokens.

Invariant: a step computes each sequence with one adapter, and the front end knows with which. No other
request ever finds keys and values that several adapters made, or that another one made than the one they are
cached for.

Imported by the engine; imports the room worker (how workers are told).
"""
