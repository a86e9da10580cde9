"""The node's stores for attached processes of the same machine, over a Unix socket.

`NodeServer` answers `NodeTier`: rows that the shared CPU cache misses, and the models to serve."""

from hps.tiers.node.attached_processes import AttachedProcesses, LoadedVersion
from hps.tiers.node.connections import NodeConnectionPool
from hps.tiers.node.server import NodeServer, ServedTiers, private_folder
from hps.tiers.node.tier import NodeTier

__all__ = [
    "AttachedProcesses",
    "LoadedVersion",
    "NodeConnectionPool",
    "NodeServer",
    "NodeTier",
    "ServedTiers",
    "private_folder",
]
