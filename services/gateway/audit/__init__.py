"""Who did what: one record of each act, in the log and in Redis.

Invariants: what a method's record is, or that it has none, is written down once for both protocols
(`acts.py`). A record is in the log before the act is answered; Redis has those of a month, and of each owner
only so many.

Imported by the application, the edges, the wiring and the commands that manage keys; imports no room.
"""
