"""Tiers by the name the configuration gives them. Import strings, so that a tier's third party is
loaded only where the tier is used."""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from typing import Any

from hps.errors import ConfigError

TIERS = {
    "cpu_cache": "hps.tiers.cpu_cache:CpuCache",
    "memory": "hps.tiers.memory:MemoryTier",
    "rocksdb": "hps.tiers.rocksdb:RocksDbTier",
}


def tier_class(name: str) -> type[Any]:
    """The class of the tier called ``name``. Raises ConfigError naming the nearest known one."""
    try:
        module, _, attribute = TIERS[name].partition(":")
    except KeyError:
        near = get_close_matches(name, TIERS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known tiers: {', '.join(TIERS)}"
        raise ConfigError(f"unknown tier {name!r}; {hint}") from None
    found: type[Any] = getattr(importlib.import_module(module), attribute)
    return found
