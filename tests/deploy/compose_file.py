"""``docker-compose.yml`` as Compose reads it: variables replaced, anchors merged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FILE, EXAMPLE = ROOT / "docker-compose.yml", ROOT / ".env.example"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def defaults() -> dict[str, list[str | None]]:
    """The variables of the file, each with the defaults it is given there (None: none)."""
    found: dict[str, list[str | None]] = {}
    for name, default in _VARIABLE.findall(FILE.read_text()):
        found.setdefault(name, []).append(default or None)
    return found


def example() -> dict[str, str]:
    """The variables in ``.env.example``."""
    lines = [line for line in EXAMPLE.read_text().splitlines() if line and line[0] != "#"]
    return dict(line.split("=", 1) for line in lines)


def compose(given: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The file with the variables ``given``, else their defaults."""
    values = dict(given or {})
    text = _VARIABLE.sub(lambda m: values.get(m[1], m[2] or ""), FILE.read_text())
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose()["services"]
    return found


def of_hps() -> dict[str, dict[str, Any]]:
    """The services that run our image."""
    return {name: s for name, s in services().items() if s["image"].startswith("hps-server:")}


def serving() -> dict[str, dict[str, Any]]:
    """The services that run until they are stopped."""
    return {name: s for name, s in of_hps().items() if s["restart"] != "no"}
