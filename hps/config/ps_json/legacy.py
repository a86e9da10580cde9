"""Result of the conversion of a ``ps.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hps.config.checks import Path as KeyPath
from hps.config.model_schema import ModelSpec


@dataclass(frozen=True)
class LegacyModel:
    """A model of an HPS ``ps.json``; each table has a folder (``key``, ``emb_vector``), a fused one
    several."""

    spec: ModelSpec
    directories: Mapping[str, tuple[Path, ...]]
    version: int = 1


@dataclass(frozen=True)
class PsJson:
    """``settings`` in the shape of the YAML file, ``origins`` with the ``ps.json`` key of each."""

    settings: dict[str, Any]
    origins: Mapping[KeyPath, str]
    models: tuple[LegacyModel, ...] = ()
    warnings: tuple[str, ...] = ()

    def where(self, path: KeyPath) -> str:
        """The key of the ``ps.json`` behind the setting at ``path``."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return "ps.json"
