"""What is let go of, and when: silent and ended sessions, models that are over, expired checkpoints.

Invariant: everything here may be done twice, by any gateways, with the same effect. What to do is a pure
decision (plan.py).

Imported by the wiring and, for its settings, the configuration; imports dispatch, checkpoints, records and
cluster.
"""
