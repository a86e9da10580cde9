"""Examples: train a model, publish it, ask the server. See examples/README.md."""
