"""GPU cache: rows in device memory, one copy for each device."""
