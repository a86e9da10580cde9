"""Messages and services of the gRPC package ``hps.v1``: the two ``.proto`` files here, and what `make proto`
makes of them. Servers are in `services/frontend/grpc/`, the client of ``Lookup`` in `hps/lookup/remote/`."""
