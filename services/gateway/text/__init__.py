"""Text and tokens: the served tokenizer, its chat template, and what a generated text holds.

Invariant: all of it is pure; the same tokenizer, template and tokens give the same text, however the tokens
were cut into parts.

Imported by inference and the edges; imports common only.
"""
