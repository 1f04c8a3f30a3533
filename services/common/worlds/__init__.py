"""What the ranks of a trainer are asked to be, as the trainer and who starts it check it alike.

Invariant: pure; what cannot be is a sentence that says what to change.

Imported by trainer and launcher; imports nothing.
"""
