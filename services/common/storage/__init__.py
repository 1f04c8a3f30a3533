"""Where files are kept that are published whole: named checkpoints, exports, snapshots.

Invariant: a reader finds all files of a version, or none.

Imported by every service; imports process and contract.
"""
