"""Predictions: a lookup, then the network."""
