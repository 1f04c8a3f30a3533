"""`python -m examples.demo`: a cluster, a fine-tune, a checkpoint and some reinforcement learning."""
