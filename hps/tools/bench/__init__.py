"""Load generator, and the comparison of two of its runs."""
