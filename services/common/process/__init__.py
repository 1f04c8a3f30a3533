"""What a process is made of: background work, logs, failpoints, the gRPC shell.

Invariant: every background task is owned and its failure is seen; every call has a deadline.

Imported by every room of every service above contract; imports contract.
"""
