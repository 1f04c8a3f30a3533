"""What is kept in Redis about a client's objects: one file a record, with its fields and its store.

Invariant: every record carries its owner, and making one never replaces one that is there. A record that
cannot be read is an error of that record alone.

Imported by every room above results, cluster and access; imports none.
"""
