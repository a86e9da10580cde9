"""Operator's tools: load generator, conformance checks, diagnosis, synthetic models."""
