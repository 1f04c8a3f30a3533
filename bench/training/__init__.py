"""Training through the API beside bare PyTorch and the trainer's engine alone, and how exact it is."""
