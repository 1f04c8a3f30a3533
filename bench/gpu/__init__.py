"""`python -m bench gpu`: the trainer's engine on one GPU beside transformers with PEFT.

Invariant: it runs where torch, transformers, peft, DeepSpeed and the packages that the engine itself imports
are all there is: no gateway, Redis, vLLM, SDK or network.
"""
