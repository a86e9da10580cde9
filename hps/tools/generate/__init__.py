"""Synthetic models and requests for load tests."""
