"""Updates by way of Kafka: a reader, a writer, and the topic of what nobody could take. The one place that
knows Kafka's client."""
