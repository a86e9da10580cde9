"""Models and requests made up for load tests."""
