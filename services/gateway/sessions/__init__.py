"""Sessions of clients: making, finding, keeping alive, ending.

Invariant: every object is looked up together with its owner.

Imported by training, sampling, the application, the edges and the wiring; imports records, cluster and
access.
"""
