"""A click-through model on real ad impressions: trained with JAX, served by hps.

Reading order: data.py, network.py, training.py, export.py, train.py (the command); then online.py, and
stream.py, which streams rows into a serving node while they are trained.
"""
