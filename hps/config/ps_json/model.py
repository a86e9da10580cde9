"""One entry of ``models`` in a ``ps.json``, and the model it describes."""

from __future__ import annotations

from typing import Any

from hps.config.checks import Path as KeyPath
from hps.config.config_errors import InvalidConfiguration, validate
from hps.config.model_schema import REMOTE_PATH, ModelSpec, RowFormatName
from hps.config.ps_json.keys import FLOAT32_LAYOUT, HASH_MAPS, ONLY_STATIC
from hps.config.ps_json.legacy import LegacyModel
from hps.config.ps_json.tables import PsTable, fused_tables, own_tables
from hps.config.ps_json.values import PsJsonReader, PsJsonSection

_CACHE_KEYS = ("gpucacheper", "hit_rate_threshold")
_FP8: RowFormatName = "float8_e4m3"


class PsModel:
    """One entry of ``models``."""

    def __init__(
        self,
        reader: PsJsonReader,
        index: int,
        values: PsJsonSection,
        key_dtype: str,
        memory_type: str,
        *,
        fuses: bool = False,
        float32_store: str = "",
    ) -> None:
        """``fuses``: tables of equal vector size are fused, unless the model disables it.

        ``float32_store``: the key and value of a store in HPS's layout, which holds only float32 rows."""
        self._reader = reader
        self.path: KeyPath = ("models", index)
        self.values = values
        self._key_dtype = key_dtype
        self._memory_type = memory_type
        self.name = str(values["model"]) if values.complete else ""
        self.fused = fuses and values["fuse_embedding_table"] is not False
        self.tables: list[PsTable] = []
        if self.static:
            reason = "a static table is in memory as a whole"
            reader.inert(self.path, values, ("gpucache", *_CACHE_KEYS), reason)
        elif not values["gpucache"]:
            reader.inert(self.path, values, _CACHE_KEYS, "gpucache is false")
        self._rows = self._row_format(float32_store)

    @property
    def static(self) -> bool:
        return bool(self.values["use_static_table"]) or (
            self.values["embedding_cache_type"] == "static"
        )

    def _row_format(self, float32_store: str) -> RowFormatName | None:
        """The format of ``fp8_quant``, or None where it is false or has no effect, which is reported."""
        if not self.values["fp8_quant"]:
            return None
        at: KeyPath = (*self.path, "fp8_quant")
        if not self.static:
            kind = self.values["embedding_cache_type"]
            self._reader.ignored(at, f"embedding_cache_type is {kind}; {ONLY_STATIC}")
        if float32_store:
            self._reader.ignored(at, f"{float32_store}, and {FLOAT32_LAYOUT}")
        return _FP8 if self.static and not float32_store else None

    @property
    def cache_share(self) -> tuple[float, str]:
        """The share of each table's rows in memory, and the key that sets it."""
        if self.static:
            key = "use_static_table" if self.values["use_static_table"] else "embedding_cache_type"
            return 1.0, key
        if self.values["gpucache"]:
            return min(float(self.values["gpucacheper"]), 1.0), "gpucacheper"
        return (1.0 if self._memory_type in HASH_MAPS else 0.0), "gpucache"

    @property
    def uvm(self) -> bool:
        return not self.static and self.values["embedding_cache_type"] == "uvm"

    @property
    def gpu_share(self) -> float:
        """The share of each table's rows on a GPU, including pinned host memory; 0: none."""
        if self.static:
            return 1.0
        if not self.values["gpucache"]:
            return 0.0
        return 1.0 if self.uvm else min(float(self.values["gpucacheper"]), 1.0)

    def legacy(self) -> LegacyModel | None:
        """The model, or None if it has errors (recorded by the reader)."""
        if not self.values.complete:
            return None
        files = self.values["sparse_files"]
        self._check_values(files)
        if not files:
            return None
        names = self._per_table("embedding_table_names", len(files))
        names = names or [f"sparse_embedding{i}" for i in range(len(files))]
        dims = self._per_table("embedding_vecsize_per_table", len(files))
        most = self._per_table("maxnum_catfeature_query_per_table_per_sample", len(files))
        if len(dims) != len(files):
            return None
        self.tables = self._tables(names, [int(dim) for dim in dims], files)
        table_of = {number: table.name for table in self.tables for number in table.members}
        data = {
            "name": self.name,
            "max_batch_size": int(self.values["max_batch_size"]),
            "tables": [
                {
                    "name": table.name,
                    "dim": table.dim,
                    "rows": self._rows,
                    "default": table.default,
                    "key_dtype": self._key_dtype,
                    "miss_policy": self._miss_policy(),
                }
                for table in self.tables
            ],
            "features": [
                {"name": name, "table": table_of[i], "pooling": "none", "max_hotness": bound}
                for i, (name, bound) in enumerate(
                    zip(names, most or [None] * len(names), strict=True)
                )
            ],
        }
        return self._checked(data)

    def _check_values(self, files: list[str]) -> None:
        if self.values["gpucacheper"] < 0:
            message = f"expected a number from 0, found {self.values['gpucacheper']:g}"
            self._wrong("gpucacheper", message)
        if not files:
            self._wrong("sparse_files", "is empty; expected one folder per table")
        for i, file in enumerate(files):
            if "://" in file:
                self._wrong("sparse_files", f"[{i}] is {file}: {REMOTE_PATH}")
        defaults = len(self.values["default_value_for_each_table"])
        if defaults > len(files):
            self._count("default_value_for_each_table", defaults, len(files))

    def _tables(self, names: list[str], dims: list[int], files: list[str]) -> list[PsTable]:
        """The tables; those missing in ``default_value_for_each_table`` get 0.0."""
        defaults = [*self.values["default_value_for_each_table"], *[0.0] * len(names)][: len(names)]
        folders = [self._reader.folder / file for file in files]
        if not self.fused:
            return own_tables(names, dims, defaults, folders)
        tables = fused_tables(dims, defaults, folders)
        for table in tables:
            if len({defaults[i] for i in table.members}) > 1:
                message = (
                    f"{', '.join(names[i] for i in table.members)} are one table, {table.name}, and get "
                    f"one default as in HPS, the last one's: {table.default:g}"
                )
                self._reader.note((*self.path, "default_value_for_each_table"), message)
        return tables

    def _checked(self, data: dict[str, Any]) -> LegacyModel | None:
        try:
            spec = validate(ModelSpec, data, lambda key: self._reader.file)
        except InvalidConfiguration as error:
            for problem in error.problems:
                at = self._ps_path(problem.path)
                if at is not None:
                    self._reader.wrong((*self.path, *at), problem.message)
            return None
        version = int(self.values["version"])
        if version < 1:
            self._wrong("version", f"expected a number from 1, found {version}")
        return LegacyModel(spec, {table.name: table.folders for table in self.tables}, version)

    def _ps_path(self, path: KeyPath) -> KeyPath | None:
        """The key of the ``ps.json`` behind a path of the model's description.

        None for a path whose error another path reports, too (a feature repeats its table's name,
        unless that
        is a fused table's)."""
        keys = {
            "name": "embedding_table_names",
            "dim": "embedding_vecsize_per_table",
            "default": "default_value_for_each_table",
            "miss_policy": "hit_rate_threshold",
            "max_hotness": "maxnum_catfeature_query_per_table_per_sample",
        }
        if path[0] == "features" and path[-1] != "max_hotness" and not self.fused:
            return None
        if path[0] in ("tables", "features") and len(path) > 2:
            number = int(path[1])
            at = self.tables[number].members[0] if path[0] == "tables" else number
            return (keys.get(str(path[2]), str(path[2])), at)
        return ("model",) if path[0] == "name" else path

    def _miss_policy(self) -> dict[str, Any]:
        """HPS's threshold as a miss policy.

        Without a GPU cache HPS always waits, and so do we; a static table holds every row, so that
        nothing is
        promoted."""
        threshold = float(self.values["hit_rate_threshold"])
        if threshold > 1 or self.static or not self.values["gpucache"]:
            return {"kind": "wait"}
        return {"kind": "default_then_promote", "min_hit_rate": max(threshold, 0.0)}

    def _per_table(self, name: str, tables: int) -> list[Any]:
        """A list with one entry per table; empty if it is missing or has another length."""
        if name not in self.values:
            return []
        values: list[Any] = self.values[name]
        if len(values) == tables:
            return values
        self._count(name, len(values), tables)
        return []

    def _count(self, name: str, found: int, tables: int) -> None:
        self._wrong(name, f"has {found} entries, but sparse_files names {tables} tables")

    def _wrong(self, name: str, message: str) -> None:
        self._reader.wrong((*self.path, name), message)
