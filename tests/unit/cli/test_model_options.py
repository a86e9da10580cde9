from __future__ import annotations

import pytest

from hps.cli.model_options import features, watermark
from hps.errors import ConfigError


def test_feature_option_takes_several_tables():
    deep_and_wide, plain = features(["ad=deep,wide+100:mean", "user=users"])
    assert deep_and_wide.vectors == {"ad.deep": "deep", "ad.wide": "wide"}
    assert (deep_and_wide.key_offset, deep_and_wide.pooling) == (100, "mean")
    assert [f.pooling for f in features(["a=users:sqrtn", "b=users:none"])] == ["sqrtn", "none"]
    assert plain.vectors == {"user": "users"}


@pytest.mark.parametrize("value", ["ad=deep,", "ad=,deep", "ad=deep,deep", "ad=deep,offsets"])
def test_feature_option_rejects_unusable_table_lists(value):
    with pytest.raises(ConfigError, match="--feature ad"):
        features([value])


def test_watermark_options_are_offsets_by_topic_and_partition():
    assert watermark(None) == {}
    found = watermark(["rows/0=5", "rows/12=90000000000", "team/ads/1=0"])
    assert found == {"rows": {"0": 5, "12": 90000000000}, "team/ads": {"1": 0}}


@pytest.mark.parametrize("value", ["rows=5", "rows/0", "/0=5", "rows/0=-1", "rows/a=5", "rows/0=x"])
def test_unusable_watermark_options_are_errors(value):
    with pytest.raises(ConfigError, match=rf"--watermark {value}: expected TOPIC/PARTITION=OFFSET"):
        watermark([value])


def test_watermark_option_names_a_partition_once():
    with pytest.raises(ConfigError, match="--watermark names 'rows/0' twice"):
        watermark(["rows/0=5", "rows/00=6"])


def test_feature_option_pads_vectors():
    first, last, rejecting = features(
        [
            "a=users:none:max_length=3:keep_first",
            "b=users:none:max_length=4:keep_last",
            "c=users:none:max_length=5",
        ]
    )
    assert [f.max_length for f in (first, last, rejecting)] == [3, 4, 5]
    found = [f.truncation for f in (first, last, rejecting)]
    assert found == ["keep_first", "keep_last", "reject"]
    with pytest.raises(ConfigError, match=r"--feature a: .*set it to none"):
        features(["a=users:max_length=3"])
    with pytest.raises(ConfigError, match=r"unknown option 'keep_both'; expected .*keep_last"):
        features(["a=users:none:max_length=3:keep_both"])
