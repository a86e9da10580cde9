"""What other processes of this machine ask the node for, over a Unix socket: rows that the shared CPU cache
lacks. `NodeTier` asks, `NodeServer` answers."""

from hps.tiers.node.connections import Connections
from hps.tiers.node.server import NodeServer, private_folder
from hps.tiers.node.tier import NodeTier

__all__ = ["Connections", "NodeServer", "NodeTier", "private_folder"]
