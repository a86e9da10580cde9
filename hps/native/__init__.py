"""The C++ core, or its NumPy twins where it could not be built.

``HPS_NATIVE=on`` fails when the compiled module is missing, ``off`` forces the twins, ``auto`` (the
default) takes what is there; ``COMPILED`` tells which one is in use.
"""

from __future__ import annotations

from hps.config.environment import native_mode
from hps.native import twin, twin_cache, twin_resp

_mode = native_mode()
COMPILED = False
partition_hash = twin.partition_hash
dedup = twin.dedup
cache_buckets = twin_cache.cache_buckets
CacheProbe = twin_cache.CacheProbe
RowReplies = twin_resp.RowReplies
ProtocolError = twin_resp.ProtocolError
if _mode != "off":
    try:
        from hps.native import _core
    except ImportError:
        if _mode == "on":
            raise
    else:
        COMPILED = True
        partition_hash = _core.partition_hash
        dedup = _core.dedup
        cache_buckets = _core.cache_buckets
        CacheProbe = _core.CacheProbe  # type: ignore[misc,assignment] # its twin has the same methods
        RowReplies = _core.RowReplies  # type: ignore[misc,assignment]
        ProtocolError = _core.ProtocolError  # type: ignore[misc,assignment]

__all__ = [
    "COMPILED",
    "CacheProbe",
    "ProtocolError",
    "RowReplies",
    "cache_buckets",
    "dedup",
    "partition_hash",
]
