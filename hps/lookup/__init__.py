"""Lookups: keys in, pooled vectors out. Dedup, fetch through the tiers, defaults, scatter, pool."""
