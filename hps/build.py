"""The composition root: settings in, a running node out. The only place that news things up."""
