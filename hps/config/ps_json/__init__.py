"""Conversion of HPS's ``ps.json`` into settings and models."""
