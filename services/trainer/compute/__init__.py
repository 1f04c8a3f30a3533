"""Tensors: base model, adapters, losses, gradients, optimizer.

Invariant: what a batch comes to does not depend on what else is computed beside it.

Imported by files, world, publish, execution and the server; imports order.
"""
