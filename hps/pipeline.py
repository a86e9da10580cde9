"""Lookup and dense model together: the one thing REST, gRPC and the Triton backend call."""
