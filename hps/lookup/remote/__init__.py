"""Lookups answered by other nodes, over gRPC (`hps/v1/lookup.proto`)."""

from hps.lookup.remote.balancing import LeastBusy, Picker
from hps.lookup.remote.budget import RetryBudget
from hps.lookup.remote.candidates import Candidates
from hps.lookup.remote.lookup import RemoteLookup
from hps.lookup.remote.nodes import Nodes
from hps.lookup.remote.outliers import Outliers
from hps.lookup.remote.targets import Certificates, Target

__all__ = [
    "Candidates",
    "Certificates",
    "LeastBusy",
    "Nodes",
    "Outliers",
    "Picker",
    "RemoteLookup",
    "RetryBudget",
    "Target",
]
