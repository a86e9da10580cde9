"""Admission control: per-model queues, byte budgets, limits for each client."""
