"""API keys: identities, roles, hot reload, exposure."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
from pathlib import Path

import pytest

from hps.config import auth
from hps.config.auth import check_exposure, key_file_warnings, load_api_keys
from hps.config.schema import Settings
from hps.config.server_settings import ApiKey, AuthSettings
from hps.errors import ConfigError, Forbidden, Unauthenticated
from tests.support.waiting import until

READER, WRITER, ROOT = "reader-secret-0001", "writer-secret-0001", "admin-secret-00001"
KEYS = f"""
- {{name: web, role: read, key: {READER}}}
- {{name: trainer, role: write, key: {WRITER}}}
- {{name: operator, role: admin, key: {ROOT}}}
"""


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path


def settings(path: Path | None, **more: object) -> AuthSettings:
    return AuthSettings.model_validate({"mode": "api_key", "keys_file": path, **more})


def rewrite(path: Path, text: str) -> None:
    """Replace the file the way an editor or a mounted secret does: a new file under the old name."""
    fresh = path.with_name("fresh")
    fresh.write_text(text)
    fresh.chmod(0o600)
    os.replace(fresh, path)


def test_every_key_identifies_its_owner(keys_file: Path) -> None:
    keys = load_api_keys(settings(keys_file))
    assert keys.enabled
    assert [keys.authenticate(k).name for k in (READER, WRITER, ROOT)] == [
        "web",
        "trainer",
        "operator",
    ]
    assert keys.authenticate(WRITER).role == "write"


@pytest.mark.parametrize(
    "key", [None, "", "nobody", READER + "x", READER[:-1], "\udcff" * 20, "ключ"]
)
def test_unknown_keys_are_rejected(keys_file: Path, key: str | None) -> None:
    with pytest.raises(Unauthenticated):
        load_api_keys(settings(keys_file)).authenticate(key)


def test_roles_are_ordered(keys_file: Path) -> None:
    keys = load_api_keys(settings(keys_file))
    table = {
        (role, needed): keys.allows(role, needed)
        for role in ("read", "write", "admin", "stranger")
        for needed in ("read", "write", "admin")
    }
    assert [k for k, allowed in table.items() if allowed] == [
        ("read", "read"),
        ("write", "read"),
        ("write", "write"),
        ("admin", "read"),
        ("admin", "write"),
        ("admin", "admin"),
    ]
    keys.require(keys.authenticate(WRITER), "read")
    with pytest.raises(Forbidden, match="'web' has role read; this needs role admin"):
        keys.require(keys.authenticate(READER), "admin")


@pytest.mark.parametrize("mode", ["off", None])
def test_mode_off_allows_every_caller(mode: str | None) -> None:
    keys = load_api_keys(AuthSettings.model_validate({"mode": mode}))
    assert not keys.enabled
    keys.require(keys.authenticate(None), "admin")


def test_every_stored_digest_is_compared(keys_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = load_api_keys(settings(keys_file))
    compared: list[bytes] = []
    real = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return real(a, b)

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    for key in (READER, ROOT, "nobody-knows-me-at-all"):
        compared.clear()
        with contextlib.suppress(Unauthenticated):
            keys.authenticate(key)
        assert len(compared) == 3
        assert key.encode() not in compared


def test_changed_key_file_takes_effect_without_restart(
    keys_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auth, "CHECK_EVERY_S", 0.0)
    keys = load_api_keys(settings(keys_file))
    rewrite(keys_file, "- {name: web, role: write, key: another-secret-0001}\n")
    with caplog.at_level(logging.INFO, "hps.config.auth"):
        assert keys.authenticate("another-secret-0001").role == "write"
    assert "1 API keys in force" in caplog.text
    with pytest.raises(Unauthenticated):
        keys.authenticate(READER)


@pytest.mark.parametrize(
    "text",
    ["- {name: web", "[]", "", "- {name: web, role: king, key: another-secret-0001}", None],
)
def test_invalid_change_keeps_the_former_keys(
    keys_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    text: str | None,
) -> None:
    monkeypatch.setattr(auth, "CHECK_EVERY_S", 0.0)
    keys = load_api_keys(settings(keys_file))
    if text is None:
        keys_file.unlink()
    else:
        rewrite(keys_file, text)
    for _ in range(3):
        assert keys.authenticate(READER).name == "web"
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1
    assert str(keys_file) in caplog.text
    assert "another-secret" not in caplog.text
    rewrite(keys_file, KEYS.replace(READER, "correct-secret-0001"))
    assert keys.authenticate("correct-secret-0001").name == "web"


def test_change_takes_effect_once_readable(
    keys_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The cause of the failure disappears without a change of the file."""
    monkeypatch.setattr(auth, "CHECK_EVERY_S", 0.0)
    keys = load_api_keys(settings(keys_file))

    def failing(path: Path) -> list[ApiKey]:
        raise ConfigError(f"{path} cannot be read: Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(auth, "read_keys_file", failing)
        rewrite(keys_file, "- {name: web, role: write, key: another-secret-0001}\n")
        for _ in range(3):
            assert keys.authenticate(READER).name == "web"
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1
    with pytest.raises(Unauthenticated):
        keys.authenticate(READER)


def test_change_of_same_size_and_time_is_detected(
    keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "CHECK_EVERY_S", 0.0)
    keys = load_api_keys(settings(keys_file))
    before = keys_file.stat()
    # The clock of the file system has to have moved on.
    until(lambda: _touched(keys_file) != before.st_ctime_ns)
    keys_file.write_text(KEYS.replace(READER, READER[::-1]))
    os.utime(keys_file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(Unauthenticated):
        keys.authenticate(READER)


def _touched(path: Path) -> int:
    """Time of the file's last change of any kind, which is now."""
    path.chmod(0o600)
    return path.stat().st_ctime_ns


def test_key_file_is_checked_at_most_once_per_interval(
    keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []
    real = auth._stamp
    monkeypatch.setattr(auth, "_stamp", lambda path: looks.append(path) or real(path))
    keys = load_api_keys(settings(keys_file))
    for _ in range(100):
        keys.authenticate(READER)
    assert len(looks) <= 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {name: web, role: king, key: another-secret-0001}", ":1: keys[0].role: expected read,"),
        ("- {name: web, role: read, key: short}", ":1: keys[0].key: expected text of 16"),
        ("- {name: web, role: read, key: 12345678901234567890}", "not shown"),
        ("- {name: a, role: read, kee: another-secret-0001}", "did you mean 'key'?"),
        ("{a: 1}", "expected a list of mappings with name, role, key"),
        (
            f"- {{name: a, role: read, key: {ROOT}}}\n- {{name: b, role: admin, key: {ROOT}}}",
            "'a' and 'b' have the same key",
        ),
        (
            f"- {{name: a, role: read, key: {ROOT}}}\n- {{name: a, role: admin, key: {READER}}}",
            "two API keys are called 'a'",
        ),
        (
            f"- {{name: a, role: read, role: admin, key: {ROOT}}}",
            ":1:25: duplicate key 'role', also on line 1",
        ),
        ("[]", "holds no API key"),
    ],
)
def test_invalid_key_file_at_start_is_rejected(keys_file: Path, text: str, message: str) -> None:
    keys_file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_api_keys(settings(keys_file))
    assert str(error.value).startswith(str(keys_file))
    assert message in str(error.value)
    for secret in ("another-secret", "12345678901234567890", "short", ROOT):
        assert secret not in str(error.value)


def test_missing_key_file_at_start_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such API key file"):
        load_api_keys(settings(tmp_path / "none.yaml"))


def test_keys_of_the_settings_add_to_the_file(keys_file: Path) -> None:
    extra = ApiKey(name="extra", role="read", key="extra-secret-00001")
    keys = load_api_keys(settings(keys_file, keys=[extra]))
    assert keys.authenticate("extra-secret-00001").name == "extra"
    assert keys.authenticate(READER).name == "web"


def test_secrets_are_not_in_the_representation(keys_file: Path) -> None:
    key = ApiKey(name="extra", role="read", key="extra-secret-00001")
    configured = settings(keys_file, keys=[key])
    assert "extra-secret" not in repr(configured) + str(configured) + repr(
        load_api_keys(configured)
    )


def test_world_readable_key_file_is_a_warning(
    keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert key_file_warnings(settings(keys_file)) == []
    keys_file.chmod(0o644)
    load_api_keys(settings(keys_file))
    assert f"chmod o-r {keys_file}" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_auth_mode(host: str) -> None:
    check_exposure(Settings.model_validate({"server": {"http": {"host": host}}}))


@pytest.mark.parametrize("listener", ["http", "admin"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "::ffff:10.0.0.1"])
def test_reachable_port_needs_an_auth_mode(listener: str, host: str) -> None:
    data = {"server": {listener: {"host": host}}}
    with pytest.raises(ConfigError, match=rf"server\.{listener}\.host: {host} is reachable"):
        check_exposure(Settings.model_validate(data))
    check_exposure(Settings.model_validate({**data, "auth": {"mode": "off"}}))


def test_certificates_identify_callers() -> None:
    ring = load_api_keys(
        AuthSettings.model_validate(
            {
                "mode": "api_key",
                "keys": [
                    {"name": "web", "role": "read", "certificate": "web.x.org"},
                    {"name": "ops", "role": "admin", "certificate": "CN=ops"},
                ],
            }
        )
    )
    assert ring.certified({"other"}) is None
    one = ring.certified({"other", "web.x.org"})
    assert one is not None
    assert (one.name, one.role) == ("web", "read")
    both = ring.certified({"web.x.org", "CN=ops"})
    assert both is not None
    assert both.name == "ops"
    with pytest.raises(Unauthenticated):
        ring.authenticate("web.x.org")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "is missing, and so is certificate"),
        ({"key": "k" * 16, "certificate": "x"}, "is set together with key"),
    ],
)
def test_caller_has_either_a_key_or_a_certificate(given: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ApiKey.model_validate({"name": "n", "role": "read", **given})


def test_two_callers_with_one_certificate_are_rejected() -> None:
    keys = [{"name": name, "role": "read", "certificate": "x"} for name in ("a", "b")]
    settings = AuthSettings.model_validate({"mode": "api_key", "keys": keys})
    with pytest.raises(ConfigError, match="'a' and 'b' have the same certificate"):
        load_api_keys(settings)
