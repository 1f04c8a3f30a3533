"""How much: limits of one request, shares of a key, budgets.

Invariant: what a key or a number of the client's would not be allowed is refused before it costs anything in
proportion to that number.

Imported by checkpoints, sessions, training, sampling, the application, the edges and the wiring; imports no
room.
"""
