"""Many calls over one stream of gRPC, for methods that are called thousands of times a second.

Invariant: a carried call ends as one of its own would: with its deadline, its trace and its typed error; and
when its stream breaks, it breaks off.

Imported by services that make or answer such calls; imports process, telemetry and contract.
"""
