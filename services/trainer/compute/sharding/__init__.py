"""Weights that ranks share by ZeRO-3: how DeepSpeed is told to, and frozen ones in int8.

Invariant: where nothing is quantised the numbers are those of a world that shards nothing.

Imported by the rest of compute; imports its deadline.
"""
