"""The contract between parameter server and workers: bytes, messages, tensors and their limits."""
