"""The RocksDB tier; see ``tier.py``.

In reading order: ``layout`` (column families, keys, values), ``database_options``,
``acknowledged_writes``, ``recovery``, ``database_handle`` and ``database`` (the folder), ``rows``
(reads and writes), ``high_water`` (writes that need no read), ``load`` (bulk), ``positions`` (streams),
``tombstones``, ``expiry``, ``write_throttle``, ``secondary``, ``checkpoint``, ``damage``, ``repair``
and ``sst`` (HPS's dumps)."""

from hps.tiers.rocksdb.checkpoint import CheckpointFolder, bootstrap, complete_checkpoints, restore
from hps.tiers.rocksdb.database_options import Access, RocksDbTuning
from hps.tiers.rocksdb.load_record import LoadRecord
from hps.tiers.rocksdb.repair import SalvagedTable, UnreadableRange
from hps.tiers.rocksdb.rows import ScannedRows
from hps.tiers.rocksdb.sst import open_sst
from hps.tiers.rocksdb.tier import RocksDbTier
from hps.tiers.rocksdb.write_throttle import StoreFigures

__all__ = [
    "Access",
    "CheckpointFolder",
    "LoadRecord",
    "RocksDbTier",
    "RocksDbTuning",
    "SalvagedTable",
    "ScannedRows",
    "StoreFigures",
    "UnreadableRange",
    "bootstrap",
    "complete_checkpoints",
    "open_sst",
    "restore",
]
