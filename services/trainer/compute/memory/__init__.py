"""What a rank can hold, what is done where it does not fit, and how tensors get there and back.

Invariant: what is announced is the least of all ranks, so what one of them cannot hold none is asked for.

Imported by the rest of compute; imports its plain data, and what layers
of recurrent/ keep.
"""
