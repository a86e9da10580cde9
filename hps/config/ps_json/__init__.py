"""Conversion of HPS's ``ps.json`` to settings and models."""
