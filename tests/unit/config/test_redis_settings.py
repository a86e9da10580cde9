"""`tiers.redis`: rejected settings, and hidden passwords."""

import pytest
import yaml

from hps.config import load_config
from hps.config.effective_settings import public_settings
from hps.config.schema import RedisSettings, Settings
from hps.errors import ConfigError


def load(tmp_path, redis, **tiers):
    path = tmp_path / "hps.yaml"
    path.write_text(yaml.safe_dump({"tiers": {"redis": redis, **tiers}}))
    return load_config(path, environ={}).settings.tiers.redis


def test_redis_is_off_by_default():
    assert Settings().tiers.redis is None


def test_empty_mapping_means_defaults(tmp_path):
    assert load(tmp_path, {}) == RedisSettings()
    assert RedisSettings().guard.deadline_ms == 50


@pytest.mark.parametrize(
    ("redis", "named"),
    [
        ({"addresses": ["a:1", "b:2"]}, "2 entries, but mode single"),
        ({"addresses": []}, "addresses"),
        ({"addresses": ["localhost"]}, "addresses"),
        ({"addresses": ["localhost:0"]}, "port 0"),
        ({"addresses": ["localhost:70000"]}, "port 70000"),
        ({"addresses": ["redis://localhost:1"]}, "addresses"),
        ({"mode": "sentinel"}, "must be set with mode sentinel"),
        ({"mode": "cluster", "database": 1}, "only database 0"),
        ({"tls": {"certificate": "a.pem"}}, "must be set together with certificate"),
        ({"tls": {"key": "a.pem"}}, "must be set together with key"),
        ({"table_ttl_s": {"user": 3}}, "table_ttl_s"),
        ({"overflow_policy": "newest"}, "newest"),
        ({"partitions": 0}, "partitions"),
    ],
)
def test_inconsistent_settings_are_rejected(tmp_path, redis, named):
    with pytest.raises(ConfigError, match=named):
        load(tmp_path, redis)


@pytest.mark.parametrize("ttl", [{"ttl_s": 3}, {"table_ttl_s": {"ctr/user": 3}}])
def test_ttl_with_hps_layout_is_rejected(tmp_path, ttl):
    hps = {"rocksdb": {"layout": "hps"}}
    with pytest.raises(ConfigError, match="have no version, so their age"):
        load(tmp_path, {"layout": "hps", **ttl}, **hps)
    assert load(tmp_path, {"layout": "hps", "table_ttl_s": {"ctr/user": None}}, **hps)


@pytest.mark.parametrize(("redis", "rocksdb"), [("hps", "native"), ("native", "hps")])
def test_stores_of_different_layouts_are_rejected(tmp_path, redis, rocksdb):
    with pytest.raises(ConfigError, match=f"is {redis}, but tiers.rocksdb.layout is {rocksdb}"):
        load(tmp_path, {"layout": redis}, rocksdb={"layout": rocksdb})
    assert load(tmp_path, {"layout": redis}, rocksdb={"layout": redis})


def test_rows_without_a_lasting_store_are_rejected(tmp_path):
    off = {"enabled": False}
    with pytest.raises(
        ConfigError, match=r"rocksdb.enabled: is false, tiers.redis is not set, and"
    ):
        load(tmp_path, None, rocksdb=off, mapped=off)
    with pytest.raises(ConfigError, match=r"redis.overflow_margin: would lose rows permanently"):
        load(tmp_path, {"overflow_margin": 1000}, rocksdb=off)
    assert load(tmp_path, {"layout": "hps"}, rocksdb=off).layout == "hps"
    assert load(tmp_path, {"overflow_margin": 1000}).overflow_margin == 1000


def test_ipv6_addresses_are_accepted(tmp_path):
    assert load(tmp_path, {"addresses": ["[::1]:6379"]}).addresses == ["[::1]:6379"]


def test_passwords_are_hidden():
    redis = RedisSettings(password="secret-1", sentinel_password="secret-2")
    settings = Settings.model_validate({"tiers": {"redis": redis.model_dump()}})
    assert "secret" not in repr(settings)
    assert "secret" not in str(public_settings(settings))
