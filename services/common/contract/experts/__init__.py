"""The experts of models that route tokens to some of many.

Invariant: pure; what is told here of a model holds in every service.

Imported by the rest of contract, by state and by every service; imports errors of contract.
"""
