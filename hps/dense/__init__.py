"""Networks: from pooled vectors and dense features to named outputs."""
