"""Encryption and identity on wires: certificates of files, and what servers and channels make of them.

Invariant: a server or channel that was given certificates never speaks without them, and files that rotate
are taken over without ending a connection.

Imported by process and every service; imports contract.
"""
