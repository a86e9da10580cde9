"""Numbers of gRPC's statuses that the transport itself answers with."""

OK, CANCELLED, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED = 0, 1, 4, 8
UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 12, 13, 14
