"""Faults on purpose, for tests of what survives them.

Invariant: no production image holds this folder (`.dockerignore`), and nothing needs it unless
TINSMITH_FAILPOINTS is set.

Imported by failpoints, and by tests; imports failpoints.
"""
