"""Where samples go: what was sent to which replica, and which one has the least to do for the next.

Invariant: a choice depends on what is known here and nothing else; it is never waited for.

Imported by sampling, the wiring and the command line; imports results (how to listen).
"""
