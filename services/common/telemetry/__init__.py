"""What a process tells of itself while it runs: its measurements for Prometheus, how its loop lags
or freezes, its log and its traces, with the call that they are about.

Invariant: nothing that is measured grows with what clients send.

Imported by every room of every service above contract; imports contract.
"""
