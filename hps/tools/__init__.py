"""Operators' tools: load generator, conformance checks, diagnosis, synthetic models."""
