"""CPU cache: rows in host memory, shared with other processes."""
