"""Triton model repositories made of ours."""
