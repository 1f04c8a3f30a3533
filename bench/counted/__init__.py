"""What is counted without a cluster: kernel calls, bytes kept, balance over ranks, the loss's memory."""
