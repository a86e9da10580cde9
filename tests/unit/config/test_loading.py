"""Configuration from file, environment and overrides, with the origin of each value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hps.config import Configuration, configuration_from, load_config
from hps.config.schema import Settings
from hps.errors import ConfigError

Write = Any


def load(
    path: Path | None, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Configuration:
    return load_config(path, overrides, environ=environ or {})


def mistakes(
    path: Path | None, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(path, overrides, environ)
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    "text", [None, "", "# nothing\n", "---\n", "server:\ntiers:\n  rocksdb:\n"]
)
def test_no_file_means_defaults(write: Write, text: str | None) -> None:
    configuration = load(None if text is None else write(text))
    assert configuration.settings == Settings()
    assert set(configuration.origins.values()) == {"default"}
    assert configuration.warnings == ()


def test_later_source_wins(write: Write) -> None:
    path = write("server:\n  http: {port: 1}\n  admin: {port: 2}\n  max_keys: 3\n")
    configuration = load(
        path,
        ["server.http.port=30"],
        {"HPS__SERVER__HTTP__PORT": "20", "HPS__SERVER__ADMIN__PORT": "21"},
    )
    server = configuration.settings.server
    assert (server.http.port, server.admin.port, server.max_keys) == (30, 21, 3)
    assert server.http.host == "127.0.0.1"
    origins = configuration.origins
    assert origins["server.http.port"] == "--set"
    assert origins["server.admin.port"] == "environment HPS__SERVER__ADMIN__PORT"
    assert origins["server.max_keys"] == f"{path}:4"
    assert origins["server.http.host"] == "default"


def test_every_value_has_an_origin(write: Write) -> None:
    path = write("models: {serve: {m: {tables: {t: {cache_rows: 5}}}}}\n")
    origins = load(path).origins
    assert origins["models.serve.m.tables.t.cache_rows"] == f"{path}:1"
    assert origins["models.serve.m.tables.t.default"] == "default"
    assert "tiers.cpu_cache.share" in origins


def test_environment_names_match_in_any_case() -> None:
    environ = {"hps__Server__hTTp__PORT": "81", "HPS__MODELS__SERVE__Ctr_2__VERSION": "7"}
    settings = load(None, environ=environ).settings
    assert settings.server.http.port == 81
    assert settings.models.serve is not None
    assert settings.models.serve["Ctr_2"].version == 7


def test_two_spellings_of_one_variable_are_rejected() -> None:
    environ = {"HPS__SERVER__HTTP__PORT": "81", "hps__server__http__port": "82"}
    assert mistakes(None, environ=environ) == [
        "hps__server__http__port: server.http.port: HPS__SERVER__HTTP__PORT sets the same setting; unset one"
    ]


def test_the_more_specific_variable_wins() -> None:
    environ = {"HPS__TIERS__CPU_CACHE__SHARE": "0.5", "HPS__TIERS": "{cpu_cache: {share: 0.1}}"}
    environ["HPS__TIERS__LOOKUP_THREADS"] = "9"
    tiers = load(None, environ=environ).settings.tiers
    assert (tiers.cpu_cache.share, tiers.lookup_threads) == (0.5, 9)


def test_variable_that_misses_an_underscore_is_a_warning() -> None:
    environ = {"HPS_SERVER__HTTP__PORT": "81", "HPS_NATIVE": "on", "HPS_SERVER_SERVICE_PORT": "1"}
    warnings = load(None, environ=environ).warnings
    assert len(warnings) == 1
    assert warnings[0].startswith("HPS_SERVER__HTTP__PORT is ignored")


def test_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPS__SERVER__HTTP__PORT", "8123")
    assert load_config(None).settings.server.http.port == 8123
    assert configuration_from({}).settings.server.http.port == 8123


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("tiers.cpu_cache.share=0.5", "tiers.cpu_cache.share", 0.5),
        ("tiers.cpu_cache.share=null", "tiers.cpu_cache.share", None),
        ("tiers.cpu_cache.enabled=false", "tiers.cpu_cache.enabled", False),
        ("auth.mode=off", "auth.mode", "off"),
        ("auth.mode=null", "auth.mode", None),
        ("auth.mode=", "auth.mode", None),
        ("server.http.host=::1", "server.http.host", "::1"),
        ("tiers.rocksdb.path=/data/a=b", "tiers.rocksdb.path", Path("/data/a=b")),
        ("models.repository=123", "models.repository", Path("123")),
        ("server.http={port: 5, host: localhost}", "server.http.port", 5),
    ],
)
def test_override_values_are_parsed(override: str, key: str, value: Any) -> None:
    setting: Any = load(None, [override]).settings
    for name in key.split("."):
        setting = getattr(setting, name)
    assert setting == value
    assert load(None, [override]).origins[key] == "--set"


def test_last_of_two_overrides_wins() -> None:
    overrides = ["server.http.port=1", "server.http.port=2"]
    assert load(None, overrides).settings.server.http.port == 2


def test_lists_are_replaced_as_a_whole(write: Write) -> None:
    key = "{name: a, role: read, key: aaaaaaaaaaaaaaaa}"
    path = write(f"auth:\n  mode: api_key\n  keys: [{key}, {key.replace('a,', 'c,')}]\n")
    override = "auth.keys=[{name: b, role: admin, key: bbbbbbbbbbbbbbbb}]"
    assert [k.name for k in load(path, [override]).settings.auth.keys] == ["b"]


def test_relative_paths_start_at_the_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "models: {repository: repo}\n"
        "tiers: {rocksdb: {path: ../db}}\n"
        "auth: {mode: api_key, keys_file: ~/keys.yaml}\n"
    )
    path = write(text, "etc/hps.yaml")
    monkeypatch.chdir(path.parent.parent)
    monkeypatch.setenv("HOME", "/home/someone")
    for spelling in (path, Path("etc/hps.yaml")):
        settings = load(spelling).settings
        assert settings.models.repository == path.parent / "repo"
        assert settings.tiers.rocksdb.path == path.parent / ".." / "db"
        assert settings.auth.keys_file == Path("/home/someone/keys.yaml")
    assert load(path, ["models.repository=repo"]).settings.models.repository == Path("repo")
    assert load(write("")).settings.models.repository == Path("models")


def test_json_in_a_yaml_file_is_read_as_yaml(write: Write) -> None:
    path = write('{"server": {"http": {"port": 99}}}')
    assert load(path).settings.server.http.port == 99


def test_configuration_is_built_from_plain_data(tmp_path: Path) -> None:
    configuration = configuration_from(
        {"models": {"repository": tmp_path}}, ["server.http.port=7"], environ={}
    )
    assert configuration.settings.models.repository == tmp_path
    assert configuration.settings.server.http.port == 7
    with pytest.raises(ConfigError, match=r"^server\.prt: unknown key"):
        configuration_from({"server": {"prt": 1}}, environ={})
