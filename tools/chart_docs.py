"""Generate helm/hps/README.md and helm/hps/values.schema.json from values.yaml and the server's settings.

``python tools/chart_docs.py`` writes both; a test compares the files with it. In values.yaml a comment
``# -- text`` above a key describes it, ``# @schema {…}`` adds to its JSON Schema, or replaces it (``$ref``).
A mapping in block style is a group of values; one in braces is a value, as ``{}`` and ``[]`` are. A value
without a description in a role (`frontend`, `ingest`) has the description of `lookup`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hps.config.schema import Settings

CHART = Path(__file__).parents[1] / "helm/hps"
_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$"
_DEFS: dict[str, Any] = {
    "Port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "Quantity": {"type": ["string", "integer"], "pattern": _QUANTITY},
    "Resources": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "requests": {"type": "object", "additionalProperties": {"$ref": "#/$defs/Quantity"}},
            "limits": {"type": "object", "additionalProperties": {"$ref": "#/$defs/Quantity"}},
            "claims": {"type": "array"},
        },
    },
}


@dataclass(frozen=True)
class Value:
    """One value: its dotted key, default, description, and additions to its schema (`@schema`)."""

    key: str
    default: Any
    about: str
    schema: dict[str, Any]


def values(text: str) -> tuple[list[Value], dict[str, Any]]:
    """The values of a chart, in order, and the JSON Schema of its root."""
    lines = text.splitlines()
    found: list[Value] = []
    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    schema = _group(root, "", lines, found)
    described = {value.key: value.about for value in found}
    filled = [
        Value(v.key, v.default, v.about or described.get(_of_lookup(v.key), ""), v.schema)
        for v in found
    ]
    return filled, schema


def _of_lookup(key: str) -> str:
    return re.sub(r"^(frontend|ingest)\.", "lookup.", key)


def _group(
    node: yaml.MappingNode, path: str, lines: list[str], found: list[Value]
) -> dict[str, Any]:
    properties = {}
    for name, (key, value) in _members(node).items():
        below = f"{path}{name}"
        about, extra = _comment(lines, key.start_mark.line)
        block = isinstance(value, yaml.MappingNode) and not value.flow_style
        if block and not extra:
            assert isinstance(value, yaml.MappingNode)
            properties[name] = _group(value, f"{below}.", lines, found)
            continue
        default = _plain(value)
        found.append(Value(below, default, about, extra))
        properties[name] = _schema(default, extra)
        if about:
            properties[name]["description"] = about
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _members(node: yaml.MappingNode) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """Keys and values by name, those of ``<<`` included."""
    members: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            members = {**_members(value), **members}
    own = {k.value: (k, v) for k, v in node.value if k.tag != "tag:yaml.org,2002:merge"}
    return {**members, **own}


def _plain(node: yaml.Node) -> Any:
    # Only SafeLoader's constructor; it needs a loader around it.
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _comment(lines: list[str], line: int) -> tuple[str, dict[str, Any]]:
    """Parse the comment right above a key: the description, and `@schema`."""
    above = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        above.insert(0, lines[line].strip().removeprefix("#").strip())
    about: list[str] = []
    extra: dict[str, Any] = {}
    in_description = False
    for text in above:
        if text.startswith("@schema"):
            extra, in_description = yaml.safe_load(text.removeprefix("@schema")), False
        elif text.startswith("--"):
            about, in_description = [text.removeprefix("--").strip()], True
        elif in_description:
            about.append(text)
    return " ".join(about), extra


def _schema(default: Any, extra: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in extra:
        return dict(extra)
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    inferred = "object" if isinstance(default, dict) else kinds.get(type(default), "null")
    return {"type": inferred, **extra}


def server_schema() -> dict[str, Any]:
    """The server's settings as ``$defs``. Nothing is required: the chart adds what it sets, and the
    server checks the whole."""
    made = Settings.model_json_schema()
    defs = {**made.pop("$defs"), "Settings": made}
    found = {name: _lean(each) for name, each in defs.items()}
    assert not found.keys() & _DEFS.keys()
    return found


def _lean(node: Any, named: bool = False) -> Any:
    """A schema without titles, defaults and ``required``; ``named``: the keys are names of settings."""
    if isinstance(node, list):
        return [_lean(each) for each in node]
    if not isinstance(node, dict):
        return node
    left = {} if named else {"title", "default", "required"}
    return {k: _lean(v, k == "properties" and not named) for k, v in node.items() if k not in left}


def schema_text(text: str) -> str:
    _, root = values(text)
    # Values that a parent chart passes to all of its charts.
    root["properties"]["global"] = {"type": "object"}
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the chart hps; made by tools/chart_docs.py",
        **root,
        "$defs": dict(sorted((_DEFS | server_schema()).items())),
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def readme_text(text: str) -> str:
    found, _ = values(text)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    return _README.format(**chart, table="\n".join(_rows(found)))


def _rows(found: list[Value]) -> Iterator[str]:
    yield "| Value | Default | Meaning |"
    yield "| --- | --- | --- |"
    for value in found:
        default = json.dumps(value.default, ensure_ascii=False)
        about = value.about.replace("|", "\\|")
        yield f"| `{value.key}` | `{default}` | {about} |"


_README = """# Chart `{name}` {version}

{description}.

```sh
helm install hps helm/hps --set models.demo=true       # for a trial: the demo's model, no Kafka, no Redis
helm install hps helm/hps --values my-values.yaml      # models.volume, redis.addresses, …
helm test hps --logs
```

Run hps on Kubernetes. Lookup nodes (a StatefulSet) hold the rows; front ends (a Deployment) answer clients
and look up rows there; ingest (a Deployment) writes streamed rows from Kafka into Redis.
[docs/kubernetes.md](../../docs/kubernetes.md) describes installation, upgrades, scaling and guarantees.

Kubernetes {kubeVersion}. `python tools/chart_docs.py` generates this page from `values.yaml`, and also
`values.schema.json`, by which Helm rejects invalid values.
[docs/configuration.md](../../docs/configuration.md) lists the settings of `config`.

## Values

{table}
"""


def main() -> None:
    text = (CHART / "values.yaml").read_text()
    (CHART / "README.md").write_text(readme_text(text))
    (CHART / "values.schema.json").write_text(schema_text(text))


if __name__ == "__main__":
    sys.exit(main())
