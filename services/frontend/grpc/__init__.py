"""gRPC ports: the Open Inference Protocol and ``hps.v1``."""

from hps.environment import disable_grpc_event_engine

disable_grpc_event_engine()
