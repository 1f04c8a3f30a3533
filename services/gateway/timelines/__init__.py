"""What became of the last requests of each session, and when: the timeline that the SDK exports.

Invariants: noting holds nothing up and is never waited for; what is kept is bounded in each session and for
each owner, ends after a day, and gives way when Redis has better uses for its memory.

Imported by dispatch, sampling, the application, the HTTP edge and the wiring; imports no room.
"""
