"""The services of Tinsmith, and what they share.

Invariant: no service imports another; all import `common`, and only the launcher imports them.
"""
