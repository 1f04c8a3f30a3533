"""Accepting work of models: creation, batches, steps, saves and exports; and the list of training runs.

Invariant: a seq_id that a model's owner used is journaled, as what it asks for or as refused, before it is
acknowledged.

Imported by the application, the edges and the wiring; imports checkpoints, sessions, records, cluster
and access.
"""
