"""Named checkpoints: who may use them, their files, and downloads of exports.

Invariant: nothing is removed that a session still answers from.

Imported by training, sampling, retention, the application, the edges and the wiring; imports records,
access and cluster.
"""
