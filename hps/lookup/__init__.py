"""Keys in, pooled vectors out: dedup, fetch through the tiers, defaults last, scatter, pool."""
