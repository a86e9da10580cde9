"""The servers and tools we are compared with, each in an environment of its own under ``.peers/``."""
