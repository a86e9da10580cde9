"""ps.json: an update source of type kafka_message_queue, and which models it updates."""

from __future__ import annotations

from typing import Any

import pytest

from hps.config.ps_json.keys import KEYS
from hps.config.update_settings import KafkaSettings

Ps = Any
ACTING = [k for k in KEYS if k.acts_with == "kafka_message_queue"]


def with_kafka(ps: Ps, **given: Any) -> dict[str, Any]:
    """A document with an update source: keys of it, or of other sections as ``section__key``."""
    document = {**ps.base, "update_source": {"type": "kafka_message_queue"}}
    for name, value in given.items():
        section, _, key = name.rpartition("__")
        section = section or "update_source"
        document[section] = {**document.get(section, {}), key: value}
    return document


def kafka(ps: Ps, **given: Any) -> KafkaSettings:
    settings = ps.load(with_kafka(ps, **given)).settings.updates.kafka
    assert settings is not None
    return settings


EFFECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "brokers": ("a:1;b:2, c:3", {"brokers": "a:1,b:2,c:3"}),
    "metadata_refresh_interval_ms": (
        500,
        {"options": {"topic.metadata.refresh.interval.ms": 500}},
    ),
    "receive_buffer_size": (1 << 20, {"max_message_bytes": 1 << 20}),
    "volatile_db__update_filters": (["m", "n.*"], {"models": ["m", "n.*"]}),
    "persistent_db__update_filters": (["m"], {"models": ["m"]}),
}


def test_defaults_are_converted(ps: Ps) -> None:
    assert kafka(ps) == KafkaSettings(brokers="127.0.0.1:9092", models=[".+"])


def test_every_key_that_acts_with_kafka_has_its_effect_tested() -> None:
    named = {f"{k.section}__{k.name}".removeprefix("update_source__") for k in ACTING}
    assert named == set(EFFECTS)


@pytest.mark.parametrize("name", EFFECTS)
def test_key_has_an_effect_only_with_kafka(ps: Ps, name: str) -> None:
    value, effect = EFFECTS[name]
    assert kafka(ps, **{name: value}) == kafka(ps).model_copy(update=effect)
    document = with_kafka(ps, **{name: value})
    key = name.replace("__", ".") if "__" in name else f"update_source.{name}"
    assert key not in "\n".join(ps.load(document).warnings)
    document["update_source"]["type"] = "null"
    (warning,) = [w for w in ps.load(document).warnings if key in w]
    assert "has no effect: update_source.type is not kafka_message_queue" in warning
    assert ps.load(document).settings.updates.kafka is None


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("poll_timeout_ms", 3),
        ("max_batch_size", 3),
        ("failure_backoff_ms", 3),
        ("max_commit_interval", 3),
    ],
)
def test_other_keys_are_warnings_and_change_nothing(ps: Ps, name: str, found: int) -> None:
    configuration = ps.load(with_kafka(ps, **{name: found}))
    assert f"update_source.{name}: has no effect" in "\n".join(configuration.warnings)
    assert configuration.settings.updates.kafka == kafka(ps)


def test_default_filter_matches_all_models(ps: Ps) -> None:
    settings = kafka(ps, volatile_db__update_filters=["^hps_.+$"])
    assert settings.takes("wdl")
    assert settings == kafka(ps)


def test_filters_match_the_whole_name(ps: Ps) -> None:
    settings = kafka(ps, persistent_db__update_filters=["ctr_.*", "m"])
    assert [settings.takes(name) for name in ("ctr_a", "m", "mm", "ctr")] == [
        True,
        True,
        False,
        False,
    ]
    assert not kafka(ps, persistent_db__update_filters=[]).takes("m")


def test_different_filter_lists_are_merged_with_a_warning(ps: Ps) -> None:
    both = {"volatile_db__update_filters": ["a", "b"], "persistent_db__update_filters": ["b", "c"]}
    assert kafka(ps, **both).models == ["a", "b", "c"]
    text = "\n".join(ps.load(with_kafka(ps, **both)).warnings)
    assert (
        "volatile_db.update_filters, persistent_db.update_filters: not as in HPS: a model of"
        in text
    )
    alike = {key: ["a"] for key in both}
    assert "update_filters" not in "\n".join(ps.load(with_kafka(ps, **alike)).warnings)


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("brokers", " ; ", "update_source.brokers: is empty; expected host:port"),
        ("metadata_refresh_interval_ms", 5, "expected a whole number from 10, found 5"),
        ("receive_buffer_size", 1, "expected a whole number from 1024, found 1"),
        ("volatile_db__update_filters", ["("], "'(' is not a regular expression"),
    ],
)
def test_invalid_values_are_named(ps: Ps, name: str, value: Any, line: str) -> None:
    (found,) = ps.mistakes(with_kafka(ps, **{name: value}))
    assert line in found


def test_origins_name_the_key_of_the_file(ps: Ps) -> None:
    configuration = ps.load(with_kafka(ps, brokers="a:1"))
    assert configuration.origins["updates.kafka.brokers"].endswith(": update_source.brokers")
