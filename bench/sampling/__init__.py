"""Sampling through the API beside vLLM alone, and publishing beside a bare broadcast."""
