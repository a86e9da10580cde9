"""The RocksDB tier; ``tier.py`` says what it keeps.

In reading order: ``layout`` (column families, keys, values), ``open``, ``acknowledged``, ``recovery``,
``opened`` and ``database`` (the folder), ``rows`` (reads and writes), ``high_water`` (which writes need no
read), ``load`` (bulk), ``positions`` (streams), ``tombstones``, ``space``, ``follow``, ``checkpoint``,
``kept``, ``damage``, ``repair`` and ``sst`` (HPS's dumps).
"""

from hps.tiers.rocksdb.checkpoint import restore
from hps.tiers.rocksdb.kept import Checkpoints, bootstrap, kept
from hps.tiers.rocksdb.load import LoadRecord
from hps.tiers.rocksdb.open import Access, Tuning
from hps.tiers.rocksdb.repair import Gap, Saved
from hps.tiers.rocksdb.rows import Scanned
from hps.tiers.rocksdb.space import StoreFigures
from hps.tiers.rocksdb.sst import open_sst
from hps.tiers.rocksdb.tier import RocksDbTier

__all__ = [
    "Access",
    "Checkpoints",
    "Gap",
    "LoadRecord",
    "RocksDbTier",
    "Saved",
    "Scanned",
    "StoreFigures",
    "Tuning",
    "bootstrap",
    "kept",
    "open_sst",
    "restore",
]
