"""The gRPC edge: the public service, translated to and from the application layer.

Invariant: it offers what the HTTP edge offers, with the same refusals.

Imported by `services.gateway.__main__` only.
"""
