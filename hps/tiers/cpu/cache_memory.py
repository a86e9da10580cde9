"""Memory of the CPU cache's tables: private, or shared with attached processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hps.errors import ConfigError
from hps.native import COMPILED, CacheTable, cache_bytes
from hps.tiers.cpu.segments import Segments
from hps.types import EmbeddingTable, Source

MOST_ROWS = 2**32 - 2
HugePages = Literal["try", "transparent", "reserved", "off"]


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Settings of the memory in which tables are allocated.

    ``huge_pages``: optional (``try``), required as transparent ones, or required from those that
    vm.nr_hugepages reserves (``reserved``). ``numa_node``: all memory is on that node."""

    shared: Segments | None = None
    huge_pages: HugePages = "try"
    numa_node: int | None = None

    def make(
        self, table: EmbeddingTable, rows: int, eviction: str, *, on_demand: bool = False
    ) -> CacheTable:
        """Make an empty table with a capacity of ``rows`` rows.

        ``on_demand``: shared memory is allocated as rows arrive, too; if there is none, rows are evicted.
        In shared memory, a table that a dead owner left may be taken over instead, with its rows. Raises
        ConfigError."""
        demands_pages = self.huge_pages in ("transparent", "reserved")
        if not COMPILED and (self.shared or self.numa_node is not None or demands_pages):
            raise ConfigError(
                "a shared cache, huge pages and a NUMA node need the native core; make setup builds it"
            )
        size = cache_bytes(rows, table.row_bytes) if rows <= MOST_ROWS else rows * table.row_bytes
        description = f"a cache of {rows} rows ({size / 2**20:,.0f} MiB) of table {table.id}"
        file = -1
        try:
            if self.shared:
                if held := self.shared.take_over_table(table, rows, eviction):
                    return held
                if not on_demand:
                    self.shared.check_free_space(size, description)
                file = self.shared.create(table, rows, eviction)
            held = self._new(table, rows, eviction, file, on_demand=on_demand)
        except (MemoryError, ValueError) as error:
            folder = f"in {self.shared.folder} " if self.shared else ""
            raise ConfigError(
                f"no memory {folder}for {description}; lower the cache's capacity_bytes, share or cache_rows"
            ) from error
        except RuntimeError as error:
            raise ConfigError(f"{description}: {error}") from error
        finally:
            if file >= 0:
                os.close(file)
        if self.shared:
            self.shared.publish(table)
        return held

    def _new(
        self, table: EmbeddingTable, rows: int, eviction: str, file: int, *, on_demand: bool
    ) -> CacheTable:
        like = np.empty((0, table.row_width), table.row_dtype)
        if not COMPILED:
            return CacheTable(rows, like, eviction, int(Source.CPU), format=table.row_format.code)
        from hps.native import _core

        node = -1 if self.numa_node is None else self.numa_node
        held: CacheTable = _core.CacheTable(  # type: ignore[assignment] # the twin's methods
            rows,
            like,
            eviction,
            int(Source.CPU),
            file=file,
            huge_pages=self.huge_pages,
            numa_node=node,
            format=table.row_format.code,
            on_demand=on_demand,
        )
        return held
