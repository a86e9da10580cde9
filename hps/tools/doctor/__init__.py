"""Checks of a machine and a deployment, each with a remedy."""
