"""The generated tables of the pages in docs/ say what the code does; the example configuration is one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hps.config import load_config
from hps.config.admission_settings import BatchingSettings
from hps.config.auth import read_keys_file
from hps.config.config_errors import leaf_values
from hps.config.effective_settings import json_schema
from hps.config.lookup_settings import LookupSettings, LookupTlsSettings
from hps.config.model_schema import ModelSpec
from hps.config.ps_json.keys import KEYS
from hps.config.schema import Settings
from hps.config.schema_paths import settings_of
from hps.config.server_settings import ApiKey, GrpcAdminSettings
from hps.config.store_settings import RedisSettings, RedisTlsSettings
from hps.config.validation import validate_file
from hps.environment import VARIABLES
from hps.tools.docs_tables import render_page, shown_key

ROOT = Path(__file__).parents[3]
CONFIGURATION = ROOT / "docs" / "configuration.md"
PS_JSON = ROOT / "docs" / "ps-json.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
EXAMPLE = ROOT / "deploy" / "config.example.yaml"


def schema_keys(schema: dict[str, Any], node: dict[str, Any], prefix: str = "") -> set[str]:
    """Dotted keys of everything a JSON Schema describes: a check that is independent of settings_of."""
    while "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    found: set[str] = set()
    for option in node.get("anyOf", []):
        found |= schema_keys(schema, option, prefix)
    for name, child in node.get("properties", {}).items():
        key = f"{prefix}.{name}" if prefix else name
        found |= {key} | schema_keys(schema, child, key)
    if "items" in node:
        found |= schema_keys(schema, node["items"], f"{prefix}[]")
    nested = [*node.get("patternProperties", {}).values()]
    if isinstance(node.get("additionalProperties"), dict):
        nested.append(node["additionalProperties"])
    for child in nested:
        found |= schema_keys(schema, child, f"{prefix}.*")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_page_equals_the_generated_one(page: Path) -> None:
    assert render_page(page.read_text()) == page.read_text(), (
        "renew it: python -m hps.tools.docs_tables docs/*.md"
    )


def test_page_lists_every_setting() -> None:
    text = CONFIGURATION.read_text()
    for name in ("settings", "model"):
        schema = json_schema(name)  # type: ignore[arg-type]
        keys = schema_keys(schema, schema)
        assert len(keys) > 20
        for key in keys:
            if key.startswith("models.serve.*.dense."):
                continue  # as in model.yaml
            shown = f"`{shown_key(key)}`"
            below = f"`{shown_key(key)}."
            assert shown in text or below in text or f"{below[:-1]}[]" in text, key


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_each_row_of_a_table_is_on_one_line(page: Path) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert [row for row in rows if not row.rstrip().endswith("|")] == []


def test_page_lists_every_key_of_ps_json() -> None:
    text = PS_JSON.read_text()
    for key in KEYS:
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{key.path}` |")]
        assert "**Acts**" in row or "**Warned**" in row
        for spelling in key.aliases:
            assert f"`{spelling}`" in row
        assert key.ignored in row


@pytest.mark.parametrize("root", [Settings, ModelSpec, ApiKey])
def test_every_setting_has_a_description(root: Any) -> None:
    for key, slot in settings_of(root):
        description = (slot.info.description if slot.info else None) or ""
        assert description.strip().endswith("."), key


@pytest.mark.parametrize("name", ["settings", "model", "api-key"])
def test_the_json_schema_describes_every_property(name: Any) -> None:
    schema = json_schema(name)
    assert schema["$schema"].endswith("2020-12/schema")
    objects = [schema, *schema.get("$defs", {}).values()]
    for described in objects:
        assert described["description"], described["title"]
        assert described["additionalProperties"] is False
        for key, node in described["properties"].items():
            target = node.get("$ref", "").rpartition("/")[2]
            assert node.get("description") or schema["$defs"][target]["description"], key


def test_page_lists_every_environment_variable() -> None:
    text = CONFIGURATION.read_text()
    sources = [*ROOT.glob("hps/**/*.py"), *ROOT.glob("services/**/*.py")]
    read = set()
    for path in sources:
        code = path.read_text()
        read |= set(re.findall(r"""environ(?:\.get\(|\[)\s*["'](\w+)""", code))
        read |= set(re.findall(r"""envvar=\[?["'](\w+)""", code))
    assert "HPS_NATIVE" in read
    assert read <= set(VARIABLES)
    for name in VARIABLES:
        assert f"| `{name}` |" in text


@pytest.fixture
def everything(tmp_path: Path) -> Path:
    """The example with what is commented out in it: with the # of the first column removed."""
    path = tmp_path / EXAMPLE.name
    path.write_text(re.sub(r"^#(?=\w|  )", "", EXAMPLE.read_text(), flags=re.MULTILINE))
    return path


def test_example_is_valid(everything: Path) -> None:
    for path in (EXAMPLE, everything):
        report = validate_file(path)
        assert (report.errors, report.warnings) == ([], [])


def test_example_equals_the_defaults() -> None:
    settings = load_config(EXAMPLE, environ={}).settings
    folders: Any = {
        "models": {"repository": True, "download": {"folder"}},
        "tiers": {"rocksdb": {"path"}},
    }
    defaults = Settings()
    assert settings.model_dump(exclude=folders) == defaults.model_dump(exclude=folders)
    for found, default in (
        (settings.models.repository, defaults.models.repository),
        (settings.models.download.folder, defaults.models.download.folder),
        (settings.tiers.rocksdb.path, defaults.tiers.rocksdb.path),
    ):
        assert found == EXAMPLE.parent / default


def test_example_has_every_setting_with_its_default(everything: Path) -> None:
    given = yaml.safe_load(everything.read_text())
    stated = {".".join(map(str, path)) for path, _ in leaf_values(given)}
    elsewhere = (
        "models.serve",
        "auth.keys[]",
        "dense.triton.models",
        *(f"server.{port}.tls." for port in ("http", "admin", "grpc.admin")),
    )
    for key, _ in settings_of(Settings):
        if not key.startswith(elsewhere):
            assert key in stated or any(s.startswith(f"{key}.") for s in stated), key
    settings = load_config(everything, environ={}).settings
    assert settings.models.serve is not None
    apart: Any = {
        "models": True,
        "tiers": {"rocksdb": {"path"}, "redis": True},
        "lookup": True,
        "updates": {"kafka", "directory"},
        "server": {"grpc": {"tls", "admin"}, "batching": True},
        "dense": {"triton"},
    }
    assert settings.model_dump(exclude=apart) == Settings().model_dump(exclude=apart)
    assert settings.tiers.redis == RedisSettings(tls=RedisTlsSettings())
    nodes = settings.lookup.nodes
    assert nodes
    assert settings.lookup == LookupSettings(nodes=nodes, tls=LookupTlsSettings())
    assert settings.server.batching == BatchingSettings()
    assert settings.server.grpc is not None
    assert settings.server.grpc.admin == GrpcAdminSettings()


def test_key_files_of_the_page_are_valid(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(- \{name.*?)```", CONFIGURATION.read_text(), re.DOTALL)
    path = tmp_path / "keys.yaml"
    roles = []
    for block in blocks:
        path.write_text(block)
        roles.append({key.role for key in read_keys_file(path)})
    assert roles == [{"read", "write"}, {"read", "admin"}]
