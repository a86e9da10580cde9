"""The C++ core, or its NumPy twins if it was not built.

``HPS_NATIVE=on`` fails if the compiled module is missing, ``off`` forces the twins, ``auto`` (the default)
takes the module if it is present; ``COMPILED`` says which one is used. A module built from other sources
than those in this folder is rejected (ConfigError): it must be rebuilt.
"""

from __future__ import annotations

from hps.environment import native_mode
from hps.native import (
    source,
    twin,
    twin_cache,
    twin_codec,
    twin_in_flight,
    twin_layered,
    twin_mapped,
    twin_misses,
    twin_pool,
    twin_resp,
    twin_rows,
    twin_scored,
)

_mode = native_mode()
COMPILED = False
partition_hash = twin.partition_hash
dedup = twin.dedup
stack_distances = twin.stack_distances
count_in_buckets = twin.count_in_buckets
cache_bytes = twin_cache.cache_bytes
CacheTable = twin_cache.CacheTable
gather_all = twin_pool.gather_all
ScoredTable = twin_scored.ScoredTable
MappedTable = twin_mapped.MappedTable
bitmap_words = twin_mapped.bitmap_words
LayeredTable = twin_layered.LayeredTable
index_hashes = twin_mapped.index_hashes
build_index_part = twin_mapped.build_index_part
place_records = twin_mapped.place_records
gather_misses = twin_misses.gather_misses
copy_keys = twin_misses.copy_keys
WorkerPool = twin_misses.WorkerPool
pool_rows = twin_pool.pool_rows
decode_rows = twin_rows.decode_rows
encode_rows = twin_rows.encode_rows
InFlight = twin_in_flight.InFlight
RowReplies = twin_resp.RowReplies
ProtocolError = twin_resp.ProtocolError
decode_hps = twin_codec.decode_hps
decode_native = twin_codec.decode_native
encode_hps = twin_codec.encode_hps
crc32 = twin_codec.crc32
if _mode != "off":
    try:
        from hps.native import _core
    except ImportError:
        if _mode == "on":
            raise
    else:
        source.check(_core)
        COMPILED = True
        partition_hash = _core.partition_hash
        dedup = _core.dedup
        stack_distances = _core.stack_distances
        count_in_buckets = _core.count_in_buckets
        cache_bytes = _core.cache_bytes
        CacheTable = _core.CacheTable  # type: ignore[misc,assignment] # its twin has the same methods
        gather_all = _core.gather_all  # type: ignore[assignment]
        MappedTable = _core.MappedTable  # type: ignore[misc,assignment] # likewise
        LayeredTable = _core.LayeredTable  # type: ignore[misc,assignment] # likewise
        bitmap_words = _core.bitmap_words
        index_hashes = _core.index_hashes
        build_index_part = _core.build_index_part
        place_records = _core.place_records
        gather_misses = _core.gather_misses  # type: ignore[assignment]
        copy_keys = _core.copy_keys  # type: ignore[assignment]
        WorkerPool = _core.WorkerPool  # type: ignore[misc,assignment]
        pool_rows = _core.pool_rows
        decode_rows = _core.decode_rows
        encode_rows = _core.encode_rows
        InFlight = _core.InFlight  # type: ignore[misc,assignment]
        RowReplies = _core.RowReplies  # type: ignore[misc,assignment]
        ProtocolError = _core.ProtocolError  # type: ignore[misc,assignment]
        decode_hps = _core.decode_hps
        decode_native = _core.decode_native
        encode_hps = _core.encode_hps
        crc32 = _core.crc32
        ScoredTable = _core.ScoredTable  # type: ignore[misc,assignment] # its twin has the same methods

__all__ = [
    "COMPILED",
    "CacheTable",
    "InFlight",
    "LayeredTable",
    "MappedTable",
    "ProtocolError",
    "RowReplies",
    "ScoredTable",
    "WorkerPool",
    "bitmap_words",
    "build_index_part",
    "cache_bytes",
    "copy_keys",
    "count_in_buckets",
    "crc32",
    "decode_hps",
    "decode_native",
    "decode_rows",
    "dedup",
    "encode_hps",
    "encode_rows",
    "gather_all",
    "gather_misses",
    "index_hashes",
    "partition_hash",
    "place_records",
    "pool_rows",
    "stack_distances",
]
