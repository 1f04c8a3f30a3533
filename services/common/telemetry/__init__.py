"""What a process tells of itself while it runs: its measurements for Prometheus, and how its loop lags.

Invariant: nothing that is measured grows with what clients send.

Imported by every room of every service above contract; imports contract.
"""
