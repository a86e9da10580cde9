"""Metrics, profiles and traces."""
