"""Servers and tools that hps is compared with, each in a separate environment under ``.peers/``."""
