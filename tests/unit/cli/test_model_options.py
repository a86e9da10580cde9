from __future__ import annotations

import pytest

from hps.cli.model_options import features
from hps.errors import ConfigError


def test_feature_option_takes_several_tables():
    deep_and_wide, plain = features(["ad=deep,wide+100:mean", "user=users"])
    assert deep_and_wide.vectors == {"ad.deep": "deep", "ad.wide": "wide"}
    assert (deep_and_wide.key_offset, deep_and_wide.pooling) == (100, "mean")
    assert plain.vectors == {"user": "users"}


@pytest.mark.parametrize("value", ["ad=deep,", "ad=,deep", "ad=deep,deep", "ad=deep,offsets"])
def test_feature_option_rejects_unusable_table_lists(value):
    with pytest.raises(ConfigError, match="--feature ad"):
        features([value])
