"""The dense part of a model: from pooled vectors and dense features to named outputs."""
