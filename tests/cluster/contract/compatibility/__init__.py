"""What of the installed tinker SDK works against a real cluster, found by calling all of it.

`sdk.py` finds what there is to call, `walk.py` calls it by the probes of the other files, `page.py` writes
docs/compatibility.md. Invariant: what the SDK has and no probe calls, down to each parameter, is an error.
"""
