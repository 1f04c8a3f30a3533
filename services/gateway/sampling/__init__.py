"""Accepting samples, and running them on sampler replicas.

Invariant: an accepted sample is on the list of one gateway until its result is published, which happens once.

Imported by the application, the edges and the wiring; imports dispatch (how to back off), placement,
checkpoints, sessions, records, results, cluster and access.
"""
