"""A node: tiers, caches, streams and models of one process, and how they are opened."""
