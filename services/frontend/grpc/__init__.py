"""gRPC ports: the Open Inference Protocol and ``hps.v1``."""
