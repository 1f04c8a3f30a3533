"""The state of the cluster in Redis: keys, scripts, the journal, the registry of live services.

Invariant: what several processes may change at once changes in one script, on one slot of a Redis Cluster.

Imported by every service; imports process and contract.
"""
