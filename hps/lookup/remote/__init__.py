"""Lookups answered by other nodes, over gRPC (`hps/v1/lookup.proto`)."""

from hps.lookup.remote.lookup import RemoteLookup
from hps.lookup.remote.picking import LeastBusy, Picker
from hps.lookup.remote.targets import Certificates, Target, Targets

__all__ = ["Certificates", "LeastBusy", "Picker", "RemoteLookup", "Target", "Targets"]
