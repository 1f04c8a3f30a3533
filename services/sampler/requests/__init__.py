"""What becomes of a request for a sample: whether it is taken on, and its way to the engine and back.

Invariant: what is refused is refused at once, and whatever ends a request, it holds nothing afterwards.

Imported by the service and the wiring; imports the rooms snapshots and engine.
"""
