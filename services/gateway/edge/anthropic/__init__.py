"""Anthropic's API over the application layer: messages, and their tokens counted.

Invariant: a field that a client can send is honoured as Anthropic documents it, or the request is refused
with the field's name; nothing is passed over.

Imported by the HTTP edge's server.
"""
