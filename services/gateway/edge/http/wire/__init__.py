"""One HTTP connection: its handshake, its requests' heads, its answers, and what it may cost.

Invariant: whoever connects is bounded before anybody knows who it is.

Imported by edge/http/server, and by config for its limits.
"""
