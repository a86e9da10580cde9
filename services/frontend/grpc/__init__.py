"""The Open Inference Protocol, and hps.v1, over gRPC."""

from hps.environment import keep_grpc_from_its_engine

keep_grpc_from_its_engine()
