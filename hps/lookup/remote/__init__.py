"""Lookups answered by other nodes over gRPC (`hps/v1/lookup.proto`)."""

from hps.lookup.remote.balancing import LeastBusy, NodePicker
from hps.lookup.remote.candidates import Candidates
from hps.lookup.remote.lookup import RemoteLookup, RemoteLookupLimits
from hps.lookup.remote.lookup_node import ClientTls, LookupNode
from hps.lookup.remote.node_registry import NodeRegistry
from hps.lookup.remote.outlier_ejection import OutlierEjection
from hps.lookup.remote.retry_budget import RetryBudget

__all__ = [
    "Candidates",
    "ClientTls",
    "LeastBusy",
    "LookupNode",
    "NodePicker",
    "NodeRegistry",
    "OutlierEjection",
    "RemoteLookup",
    "RemoteLookupLimits",
    "RetryBudget",
]
