import pytest

from hps.errors import ConfigError
from hps.tiers.memory import MemoryTier
from hps.tiers.registry import TIERS, tier_class


@pytest.mark.parametrize("name", TIERS)
def test_every_name_leads_to_a_tier(name):
    found = tier_class(name)
    for verb in ("fetch", "insert", "update", "delete", "evict", "close"):
        assert callable(getattr(found, verb))


def test_a_name_leads_to_its_class():
    assert tier_class("memory") is MemoryTier


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'rocksdb'"):
        tier_class("rocksdbb")
    with pytest.raises(ConfigError, match="known tiers: cpu_cache, memory, rocksdb"):
        tier_class("zzz")
