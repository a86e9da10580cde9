"""Updates from Kafka: consumer, producer, dead letters. Only this package imports Kafka's client."""
