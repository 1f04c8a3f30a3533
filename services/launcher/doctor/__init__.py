"""`tinsmith doctor`: what this machine can run, and what a model of a given size needs.

Invariant: nothing is loaded, downloaded or started to find out. What is estimated says from what.

Imported by the command line.
"""
