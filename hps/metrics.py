"""Every metric of the product, in one table; the only import of prometheus_client."""
