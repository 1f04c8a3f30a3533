"""Inference without a session: text and chats on base models and named checkpoints.

Invariant: a request goes the way of every sample (checked, journaled, in turns, on one immutable snapshot),
in a session that is made for its owner and let go when it is idle.

Imported by the application, the edges and the wiring; imports sampling, sessions, results and text.
"""
