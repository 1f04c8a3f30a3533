"""OpenAI's API over the application layer: models, completions and chat completions.

Invariant: a field that a client can send is honoured as OpenAI documents it, or the request is refused with
the field's name; nothing is passed over.

Imported by the HTTP edge's server.
"""
