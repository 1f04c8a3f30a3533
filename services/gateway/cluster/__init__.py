"""What a gateway knows of the cluster around it: live services, base models, whether Redis has restarted.

Invariant: a request is judged the same way while a trainer or sampler restarts, and what was acknowledged
is written again when Redis comes back without it.

Imported by dispatch, sessions, training, sampling, checkpoints, retention, the application, the edges and the
wiring; imports no room.
"""
