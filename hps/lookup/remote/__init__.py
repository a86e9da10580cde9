"""Lookups answered by other nodes, over gRPC (`hps/v1/lookup.proto`)."""

from hps.lookup.remote.balancing import LeastBusy, NodePicker
from hps.lookup.remote.budget import RetryBudget
from hps.lookup.remote.candidates import Candidates
from hps.lookup.remote.lookup import RemoteLookup
from hps.lookup.remote.nodes import NodeRegistry
from hps.lookup.remote.outliers import OutlierEjection
from hps.lookup.remote.targets import ClientTls, LookupNode

__all__ = [
    "Candidates",
    "ClientTls",
    "LeastBusy",
    "LookupNode",
    "NodePicker",
    "NodeRegistry",
    "OutlierEjection",
    "RemoteLookup",
    "RetryBudget",
]
