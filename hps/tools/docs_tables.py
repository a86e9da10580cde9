"""Generator of the tables in the pages of ``docs/``.

``python -m hps.tools.docs_tables docs/*.md`` rewrites everything between ``<!-- begin NAME -->`` and
``<!-- end -->``; a test compares the files with it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from hps.config.model_schema import DenseSpec, ModelSpec
from hps.config.ps_json.keys import KEYS, MAX_U64, REQUIRED, PsKey
from hps.config.schema import Settings
from hps.config.schema_paths import SchemaSlot, describe, settings_of
from hps.config.server_settings import ApiKey
from hps.environment import VARIABLES
from hps.observability.metric_page import metric_tables

_BLOCK = re.compile(r"(<!-- begin ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NAMES = {
    "serve.*": "serve.<model>",
    "tables.*": "tables.<table>",
    "embeddings.*": "embeddings.<feature>",
}


def render_page(text: str) -> str:
    """Return the page with every block generated again from the code."""
    return _BLOCK.sub(lambda m: f"{m[1]}\n{BLOCKS[m[2]]()}\n\n{m[3]}", text)


def shown_key(key: str) -> str:
    """The key for readers: ``models.serve.*.version`` as ``models.serve.<model>.version``."""
    for pattern, name in _NAMES.items():
        key = key.replace(pattern, name)
    return key


def _settings(root: type[BaseModel], closed: tuple[type[BaseModel], ...] = ()) -> str:
    rows = []
    for key, slot in settings_of(root, closed):
        if slot.model in closed:
            expected = "as in `model.yaml`"
        else:
            expected = describe(slot)
        meaning = (slot.info.description if slot.info else None) or ""
        rows.append((f"`{shown_key(key)}`", expected, _default(slot), meaning))
    return _table(("Setting", "Expected", "Default", "Meaning"), rows)


def _by_group() -> str:
    """The settings, one table per top key."""
    parts = []
    for name, info in Settings.model_fields.items():
        group = info.annotation
        assert isinstance(group, type)
        rows = _settings(Settings, (DenseSpec,)).splitlines()
        own = [row for row in rows[2:] if row.startswith(f"| `{name}.")]
        parts.append(f"### `{name}`\n\n{info.description}\n\n" + "\n".join([*rows[:2], *own]))
    return "\n\n".join(parts)


def _default(slot: SchemaSlot) -> str:
    default: Any = slot.info.default if slot.info else PydanticUndefined
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, BaseModel):
        return "as below"
    return f"`{_plain(default)}`"


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, list) else str(value)


def _ps_json() -> str:
    parts = []
    for section in dict.fromkeys(key.section for key in KEYS):
        keys = [key for key in KEYS if key.section == section]
        title = f"### `{section}`" if section else "### Top level"
        rows = [(f"`{k.path}`", _ps_type(k), _ps_default(k), _ps_effect(k)) for k in keys]
        parts.append(f"{title}\n\n" + _table(("Key", "Type", "Default", "Here"), rows))
    return "\n\n".join(parts)


def _ps_type(key: PsKey) -> str:
    if key.kind == "list":
        return f"list of {key.items}"
    if key.kind != "enum":
        return key.kind
    names = dict.fromkeys(key.aliases.values())
    spellings = ((n, [s for s, c in key.aliases.items() if c == n and s != n]) for n in names)
    return "; ".join(
        f"`{n}`" + (f" ({', '.join(f'`{s}`' for s in others)})" if others else "")
        for n, others in spellings
    )


def _ps_default(key: PsKey) -> str:
    if key.default is REQUIRED:
        return "required"
    if key.kind == "object":
        return "absent"
    if key.default == MAX_U64:
        return "2^64-1"
    return f"`{_plain(key.default)}`" if key.default != "" else "empty"


def _ps_effect(key: PsKey) -> str:
    acts = f"**Acts** with `{key.acts_with}`" if key.acts_with else "**Acts**"
    if key.ignored and not key.acts_with:
        return f"{key.meaning} **Warned**: {key.ignored}."
    otherwise = f", else **warned**: {key.ignored}" if key.ignored else ""
    parts = [f"{key.meaning} {acts}{otherwise}."]
    parts += [f"`{value}` is **warned**: {reason}." for value, reason in key.ignored_values.items()]
    bounds = (("Less than", key.least), ("More than", key.most))
    parts += [
        f"{word} {bound:,} is taken as {bound:,}, **warned**."
        for word, bound in bounds
        if bound is not None
    ]
    return " ".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, cells)) + " |" for cells in lines)


def _cell(text: str) -> str:
    """``text`` on one line, as a row of a Markdown table must be."""
    return " ".join(text.split()).replace("|", "\\|")


BLOCKS: dict[str, Callable[[], str]] = {
    "settings": _by_group,
    "model": lambda: _settings(ModelSpec),
    "api-key": lambda: _settings(ApiKey),
    "environment": lambda: _table(
        ("Variable", "Meaning"), [(f"`{n}`", text) for n, text in VARIABLES.items()]
    ),
    "ps-json": _ps_json,
    "metrics": metric_tables,
}


def main(paths: Sequence[str]) -> None:
    for name in paths:
        path = Path(name)
        path.write_text(render_page(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
