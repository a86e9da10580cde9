"""A ps.json that tests change, and its conversion."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.config import Configuration, load_config
from hps.errors import ConfigError

ROWS = 1000


class Ps:
    """Two tables of 1000 rows, a hash map and a RocksDB; other keys are absent."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ps.json"
        for table in ("t0", "t1"):
            (folder / table).mkdir()
            np.arange(ROWS, dtype="<i8").tofile(folder / table / "key")
        model = {
            "model": "m",
            "sparse_files": ["t0", str(folder / "t1")],
            "embedding_vecsize_per_table": [4, 8],
        }
        self.base: dict[str, Any] = {
            "volatile_db": {"type": "hash_map"},
            "persistent_db": {"type": "rocks_db"},
            "models": [model],
        }

    def put(self, key: Any, value: Any, document: dict[str, Any] | None = None) -> dict[str, Any]:
        """A copy of the document (of the base) with one key set, as in ``models[].gpucache``."""
        section, _, name = getattr(key, "path", key).rpartition(".")
        copy = deepcopy(self.base if document is None else document)
        at = copy["models"][0] if section == "models[]" else copy
        if section and section != "models[]":
            at = copy.setdefault(section, {})
        at[name] = value
        return copy

    def load(self, document: Any) -> Configuration:
        """Load a mapping, or unchanged text."""
        self.path.write_text(document if isinstance(document, str) else json.dumps(document))
        return load_config(self.path, environ={})

    @staticmethod
    def outcome(configuration: Configuration) -> Any:
        """A configuration without its warnings and origins."""
        return (
            configuration.settings.model_dump(),
            [(m.spec.model_dump(), dict(m.directories), m.version) for m in configuration.legacy],
        )

    def mistakes(self, document: Any) -> list[str]:
        """The error's lines, without the file's name that each starts with."""
        with pytest.raises(ConfigError) as error:
            self.load(document)
        lines = str(error.value).splitlines()
        assert all(line.startswith(str(self.path)) for line in lines)
        return [line.removeprefix(str(self.path)) for line in lines]


@pytest.fixture
def ps(tmp_path: Path) -> Ps:
    return Ps(tmp_path)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def _write(text: str, name: str = "hps.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return _write
