"""ps.json: a volatile database of type redis_cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hps.config.effective_settings import public_settings
from hps.config.ps_json.keys import KEYS, PsKey
from hps.config.store_settings import RedisSettings

Ps = Any


def with_redis(ps: Ps, **keys: Any) -> dict[str, Any]:
    return {**ps.base, "volatile_db": {"type": "redis_cluster", **keys}}


def redis(ps: Ps, **keys: Any) -> RedisSettings:
    settings = ps.load(with_redis(ps, **keys)).settings.tiers.redis
    assert settings is not None
    return settings


# What every key that acts with Redis does: a value other than the default, and what it sets.
EFFECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "address": ("a:1, b:2;[::1]:3", {"addresses": ["a:1", "b:2", "[::1]:3"]}),
    "user_name": ("ann", {"username": "ann"}),
    "password": ("secret-1", {"password": "secret-1"}),
    "num_partitions": (3, {"partitions": 3}),
    "num_node_connections": (9, {"connections": 9}),
    "overflow_margin": (1000, {"overflow_margin": 1000}),
    "overflow_policy": ("least_used", {"overflow_policy": "least_used"}),
    "overflow_resolution_target": (0.5, {"overflow_resolution_target": 0.5}),
    "initial_cache_rate": (0.25, {"initial_cache_rate": 0.25}),
    "cache_missed_embeddings": (True, {"cache_missed_embeddings": True}),
    "initialize_after_startup": (False, {"initial_cache_rate": 0.0}),
}
TLS = {
    "tls_ca_certificate": "ca",
    "tls_client_certificate": "certificate",
    "tls_client_key": "key",
    "tls_server_name_identification": "server_name",
}


def test_defaults_are_those_of_hps(ps: Ps) -> None:
    assert redis(ps) == RedisSettings(
        addresses=["127.0.0.1:7000"],
        mode="cluster",
        layout="hps",
        partitions=min(16, os.cpu_count() or 1),
        connections=5,
        initial_cache_rate=1.0,
        cache_missed_embeddings=False,
    )


@pytest.mark.parametrize("name", EFFECTS)
def test_every_key_has_an_effect(ps: Ps, name: str) -> None:
    value, effect = EFFECTS[name]
    configuration = ps.load(with_redis(ps, **{name: value}))
    assert configuration.settings.tiers.redis == redis(ps).model_copy(update=effect)
    assert name not in "\n".join(configuration.warnings)


def test_every_redis_key_has_a_case() -> None:
    found = {k.name for k in KEYS if k.acts_with == "redis_cluster"}
    shared_keys = {
        "num_partitions",
        "overflow_margin",
        "overflow_policy",
        "initialize_after_startup",
    }
    assert found | shared_keys == {*EFFECTS, *TLS, "enable_tls"}


def test_tls_keys_are_converted(ps: Ps, tmp_path: Path) -> None:
    keys = {"enable_tls": True, "tls_ca_certificate": "ca.pem", "tls_client_certificate": "c.pem"}
    tls = redis(ps, **keys, tls_client_key="/k.pem", tls_server_name_identification="r.test").tls
    assert tls is not None
    assert (tls.ca, tls.certificate) == (tmp_path / "ca.pem", tmp_path / "c.pem")
    assert (tls.key, tls.server_name) == (Path("/k.pem"), "r.test")


def test_existing_default_tls_files_are_used(ps: Ps, tmp_path: Path) -> None:
    tls = redis(ps, enable_tls=True).tls
    assert tls is not None
    assert (tls.ca, tls.certificate, tls.key) == (None, None, None)
    assert tls.server_name == "redis.localhost"
    for name in ("cacertbundle.crt", "client_cert.pem", "client_key.pem"):
        (tmp_path / name).touch()
    tls = redis(ps, enable_tls=True).tls
    assert tls is not None
    assert (tls.ca, tls.key) == (tmp_path / "cacertbundle.crt", tmp_path / "client_key.pem")


def test_tls_keys_without_tls_are_warnings(ps: Ps) -> None:
    configuration = ps.load(with_redis(ps, tls_ca_certificate="ca.pem"))
    assert configuration.settings.tiers.redis.tls is None
    (warning,) = configuration.warnings
    assert "volatile_db.tls_ca_certificate: has no effect" in warning
    assert "enable_tls is false" in warning


@pytest.mark.parametrize(
    "key", [k for k in KEYS if k.acts_with == "redis_cluster"], ids=lambda k: k.name
)
def test_redis_keys_with_a_hash_map_are_warnings(ps: Ps, key: PsKey) -> None:
    samples = {"bool": True, "int": 3, "float": 0.5, "text": "x", "path": "x", "enum": "random"}
    configuration = ps.load(ps.put(key, samples[key.kind]))
    assert configuration.settings.tiers.redis is None
    assert key.name in "\n".join(configuration.warnings)


def test_rocksdb_below_redis_gets_the_hps_layout(ps: Ps) -> None:
    document = with_redis(ps)
    del document["persistent_db"]
    tiers = ps.load(document).settings.tiers
    assert (tiers.rocksdb.enabled, tiers.rocksdb.layout, tiers.redis.layout) == (True, "hps", "hps")


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"address": "nowhere"}, "volatile_db.address: expected host:port, found 'nowhere'"),
        ({"address": " , "}, "volatile_db.address: is empty; expected host:port"),
        ({"num_partitions": 0}, "volatile_db.num_partitions: expected a whole number from 1"),
        ({"num_node_connections": 0}, "volatile_db.num_node_connections: expected a whole number"),
        ({"overflow_margin": 0}, "volatile_db.overflow_margin: expected a whole number from 1"),
    ],
)
def test_invalid_values_are_rejected(ps: Ps, keys: dict[str, Any], named: str) -> None:
    assert named in "\n".join(ps.mistakes(with_redis(ps, **keys)))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"num_partitions": 5000}, "volatile_db.num_partitions"),
        ({"overflow_resolution_target": 0}, "volatile_db.overflow_resolution_target"),
    ],
)
def test_value_out_of_range_names_the_key(ps: Ps, keys: dict[str, Any], named: str) -> None:
    assert named in "\n".join(ps.mistakes(with_redis(ps, **keys)))


def test_password_is_hidden(ps: Ps) -> None:
    configuration = ps.load(with_redis(ps, password="secret-1"))
    assert "secret-1" not in str(public_settings(configuration.settings))
    assert "secret-1" not in "\n".join(ps.mistakes(with_redis(ps, password=["secret-1"])))
