"""Carrying accepted training operations out: leases, order, retries, results.

Invariant: every model with unfinished operations has one gateway that sends them, in the order of their
numbers; an operation stays in the journal until its result is published. What to send and what to do about
each failure are pure decisions (plan.py).

Imported by sampling (how to back off), retention and the wiring; imports records, results and cluster.
"""
