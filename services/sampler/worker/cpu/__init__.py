"""What vLLM computes wrongly on a CPU, or slower than it could, corrected.

Invariant: each correction is of one fault of vLLM, and a test fails when it is needed no longer.

Imported by the room worker, and in effect where its devices are CPUs.
"""
