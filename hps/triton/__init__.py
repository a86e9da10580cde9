"""Export of models to Triton model repositories."""
