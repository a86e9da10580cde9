"""Continuous batching on GPUs: predictions of this process, and of others, in common batches."""
