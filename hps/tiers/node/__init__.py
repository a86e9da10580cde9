"""What other processes of this machine ask the node for, over a Unix socket: rows that the shared CPU cache
lacks, and which models to serve. `NodeTier` asks, `NodeServer` answers."""

from hps.tiers.node.attached_processes import AttachedProcesses, LoadedVersion
from hps.tiers.node.connections import NodeConnectionPool
from hps.tiers.node.server import NodeServer, private_folder
from hps.tiers.node.tier import NodeTier

__all__ = [
    "AttachedProcesses",
    "LoadedVersion",
    "NodeConnectionPool",
    "NodeServer",
    "NodeTier",
    "private_folder",
]
