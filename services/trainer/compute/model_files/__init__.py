"""What there is in the files of a base model: which causal language model, and weights in which form.

Invariant: what is loaded is what the files hold, all of it or a refusal with what to do.

Imported by compute/base_model.py and by the room files; imports nothing of the trainer.
"""
