"""`python -m bench`: what Tinsmith costs over bare PyTorch and bare vLLM, and how exact its numbers are."""
