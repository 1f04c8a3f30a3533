"""A model that trains all of its weights: its own DeepSpeed engine, and its state as files of every rank.

Invariant: what knows DeepSpeed's insides, besides the base model, is here.

Imported by the engine; imports the rest of compute.
"""
