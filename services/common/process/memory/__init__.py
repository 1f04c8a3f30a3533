"""What a process keeps of its memory: of results that may be asked for again, and of what nobody uses, the
interpreter's garbage and what the C allocator got back.

Invariant: a process decides for itself alone.

Imported by services that take large requests, or compute on CPUs; imports nothing.
"""
