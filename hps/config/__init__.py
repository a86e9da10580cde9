"""Settings and ``model.yaml``: the only place that reads YAML and the environment."""
