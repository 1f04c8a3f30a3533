"""The HTTP edge: what the tinker SDK speaks, translated to and from the application layer.

Invariant: a body is read within its bounds before it is parsed, and only routes that are known are answered.

Imported by `services.gateway.__main__` only.
"""
