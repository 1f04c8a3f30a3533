"""How an adapter comes into a slot of vLLM's layers.

Invariant: what is in a slot is bit for bit what vLLM's own layers would have put there, and zeros in all of
the rest; on the engine's thread that is one copy to the device, however many layers there are.

Imported by the room worker.
"""
