"""The certificates that a cluster on one machine makes for itself.

Invariant: who has them is a process of this cluster or its operator.

Imported by up; imports common.tls.
"""
