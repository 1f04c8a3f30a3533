"""The ranks: starting them, and commands that all of them carry out in one order.

Invariant: no rank takes part in a collective that another one does not; what differs between ranks ends the
world.

Imported by publish, execution and the server; imports compute.
"""
