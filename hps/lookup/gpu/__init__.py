"""Lookups whose vectors stay in device memory."""
