"""What other processes of this machine ask the node for, over a Unix socket: rows that the shared CPU cache
lacks, and which models to serve. `NodeTier` asks, `NodeServer` answers."""

from hps.tiers.node.connections import Connections
from hps.tiers.node.followers import Followers, Loaded
from hps.tiers.node.server import NodeServer, private_folder
from hps.tiers.node.tier import NodeTier

__all__ = ["Connections", "Followers", "Loaded", "NodeServer", "NodeTier", "private_folder"]
