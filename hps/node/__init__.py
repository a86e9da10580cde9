"""A node: the tiers, caches, streams and models of one process, and how they are opened."""
