"""Who is calling, and what that one may do: API keys, their roles and scopes.

Invariant: a key that is not known for certain lets nobody in, and what a method needs is written down once,
for both protocols.

Imported by the application, the edges, the wiring and the commands that manage keys; imports no room.
"""
