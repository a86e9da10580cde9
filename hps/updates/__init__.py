"""Everything that changes rows while the node serves."""
