"""What runs next: the order of one model's operations, turns of models, sizes of micro-batches.

Invariant: pure decisions over plain data; nothing passes an operation that must be alone.

Imported by compute, execution and the server; imports no room.
"""
