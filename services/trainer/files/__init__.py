"""Durable state, checkpoints and exports as files.

Invariant: what is named by the journal or a record is complete on disk.

Imported by publish, execution and the server; imports compute.
"""
