"""Secrets in files: reading, rereading, and no quoting."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hps.config import configuration_from
from hps.config.effective_settings import effective_settings, public_settings
from hps.config.schema import Settings
from hps.config.secrets import Secret, read_secret
from hps.config.validation import check_files, validate_file
from hps.errors import ConfigError

SECRET = "planted-secret-0001"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    return path


def test_line_ending_is_not_part_of_the_secret(file: Path) -> None:
    assert read_secret(file, "a.b") == SECRET
    file.write_text(f" {SECRET} \r\n")
    assert read_secret(file, "a.b") == f" {SECRET} "


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        (None, "No such file or directory; mount the secret there, or correct the path"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"\xff\xfe" + SECRET.encode(), "is not text"),
    ],
)
def test_unreadable_secret_names_setting_and_file(
    file: Path, contents: bytes | None, problem: str
) -> None:
    file.unlink() if contents is None else file.write_bytes(contents)
    with pytest.raises(ConfigError, match=f"a.b: {file}.*{problem}") as caught:
        read_secret(file, "a.b")
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_changed_secret_file_is_read_again(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "hps.config.secrets")
    secret = Secret(None, file, "a.b")
    file.write_text("another")
    assert secret.now() == "another"
    file.unlink()
    assert [secret.now(), secret.now()] == ["another"] * 2
    assert len(caplog.messages) == 1
    assert "failed to reload the secret, keeping the former one: a.b: " in caplog.text
    file.write_text("third")
    assert secret.now() == "third"
    assert Secret("given", None, "a.b").now() == "given"


def kafka(**more: object) -> dict[str, object]:
    return {"updates": {"kafka": {"brokers": "kafka:9092", **more}}}


def test_kafka_options_are_read_from_files(file: Path) -> None:
    given = kafka(options={"sasl.username": "me"}, options_files={"sasl.password": str(file)})
    settings = configuration_from(given, environ={}).settings
    assert settings.updates.kafka is not None
    options = settings.updates.kafka.client_options()
    assert options == {"sasl.username": "me", "sasl.password": SECRET}
    file.unlink()
    with pytest.raises(ConfigError, match=r"updates\.kafka\.options_files\.sasl\.password: "):
        check_files(settings, settings.server.role)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            kafka(options={"sasl.password": SECRET}, options_files={"sasl.password": "/x"}),
            "options_files.sasl.password: is also in options",
        ),
        (kafka(options_files={"group.id": "/x"}), "options_files.group.id: is set by hps"),
        (kafka(options={"group.id": SECRET}), "options.group.id: is set by hps"),
        (
            {"tiers": {"redis": {"password": SECRET, "password_file": "/x"}}},
            "password_file: is set together with password",
        ),
    ],
)
def test_secret_in_value_and_file_is_rejected(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        configuration_from(settings, environ={})
    assert SECRET not in str(caught.value)


def test_possible_secrets_are_hidden() -> None:
    given = kafka(options={"sasl.password": SECRET})
    given |= {"tiers": {"redis": {"password": SECRET, "sentinel_password": SECRET}}}
    given |= {"auth": {"mode": "api_key", "keys": [{"name": "a", "role": "read", "key": SECRET}]}}
    configuration = configuration_from(given, environ={})
    settings = configuration.settings
    for shown in (
        effective_settings(configuration),
        public_settings(settings),
        settings,
        configuration,
    ):
        assert SECRET not in repr(shown)


def test_missing_secret_file_is_a_warning(tmp_path: Path, file: Path) -> None:
    config = tmp_path / "hps.yaml"
    config.write_text("tiers: {redis: {password_file: secret}}")
    assert validate_file(config).warnings == []
    file.write_text("")
    (error,) = validate_file(config).errors
    assert "is empty" in error
    file.unlink()
    report = validate_file(config)
    assert not report.errors
    assert "the server will not start without" in report.warnings[0]


@pytest.mark.parametrize(
    "contents", ["two words-0123456789", "a\nplanted-secret-0001", "short", "ü" * 20]
)
def test_invalid_api_key_file_is_rejected(file: Path, contents: str) -> None:
    """gRPC would quote it in its error."""
    file.write_text(contents)
    for check in (
        lambda: check_files(lookups_of(file), "frontend"),
        lambda: Secret(None, file, "lookup.api_key_file", api_key=True),
    ):
        with pytest.raises(
            ConfigError, match=r"lookup\.api_key_file: .*does not contain an API key; expected"
        ) as caught:
            check()
        assert contents not in str(caught.value)
    file.write_text(f"{SECRET}\n")
    check_files(lookups_of(file), "frontend")


def lookups_of(file: Path) -> Settings:
    lookup = {"nodes": ["x:1"], "api_key_file": str(file)}
    return configuration_from(
        {"lookup": lookup, "server": {"role": "frontend"}}, environ={}
    ).settings


def test_users_in_addresses_are_hidden() -> None:
    for given in (
        {"tiers": {"redis": {"addresses": [f"redis://:{SECRET}@redis:6379"]}}},
        {"lookup": {"nodes": [f"https://me:{SECRET}@node"]}},
    ):
        with pytest.raises(ConfigError, match=r"://\*\*\*\*\*\*\*\*@") as caught:
            configuration_from(given, environ={})
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "warns"),
    [
        (f"tiers.redis.password={SECRET}", "tiers.redis.password"),
        (f"tiers.redis={{password: {SECRET}}}", "tiers.redis.password"),
        (f"auth.keys=[{{name: a, role: read, key: {SECRET}}}]", "auth.keys"),
        ("tiers.redis.password_file=/x", ""),
        ("tiers.redis={database: 1}", ""),
    ],
)
def test_secrets_on_the_command_line_are_a_warning(given: str, warns: str) -> None:
    overrides = [given, "auth.mode=api_key", "auth.keys_file=x"]
    warnings = configuration_from({}, overrides, environ={}).warnings
    assert [w.partition(":")[0] for w in warnings] == ([f"--set {warns}"] if warns else [])
    assert SECRET not in "".join(warnings)
