"""Reading and writing YAML: strict, with lines, and the same for every reader."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hps.config import yaml_text
from hps.config.yaml_text import dump_yaml, parse_yaml, read_text
from hps.errors import ConfigError


def parse(text: str) -> Any:
    return parse_yaml(text, "f.yaml").data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("no", "no"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("1e-3", 0.001),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("010", 10),
        ("0x10", 16),
        ("0o17", 15),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("~", None),
        ("null", None),
        ("", None),
        ("'1'", "1"),
        ("=", "="),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    parsed = parse(f"a: {text}")["a"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_empty_file_is_null() -> None:
    assert parse("") is None
    assert parse("# only a comment\n") is None


def test_every_value_has_its_line() -> None:
    document = parse_yaml("a: 1\nb:\n  c: [1,\n   2]\n  d: {e: 5}\n", "f.yaml")
    assert document.lines == {
        ("a",): 1,
        ("b",): 2,
        ("b", "c"): 3,
        ("b", "c", 0): 3,
        ("b", "c", 1): 4,
        ("b", "d"): 5,
        ("b", "d", "e"): 5,
    }


def test_anchors_are_resolved_and_mappings_merged() -> None:
    text = "x: &x {a: 1, b: 2}\ny: &y\n  <<: *x\n  b: 3\nz: *y\nw: {<<: [*y, *x], c: 4}\n"
    assert parse(text) == {
        "x": {"a": 1, "b": 2},
        "y": {"a": 1, "b": 3},
        "z": {"a": 1, "b": 3},
        "w": {"a": 1, "b": 3, "c": 4},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "f.yaml:3:1: duplicate key 'a', also on line 1"),
        ("a: {b: 1, b: 2}", "f.yaml:1:11: duplicate key 'b', also on line 1"),
        ("x: &x {a: 1}\ny: {<<: *x, b: 1, b: 2}", "f.yaml:2:19: duplicate key 'b', also"),
        ("a: [1, 2", "f.yaml:2:1: not valid YAML: did not find expected ',' or ']'"),
        ("a: b: c", "f.yaml:1:5: not valid YAML: mapping values are not allowed"),
        ("a:\n\tb: 1", "f.yaml:2:1: not valid YAML: found character that cannot start"),
        ("1: 2", "f.yaml:1:1: the key 1 must be text; put it in quotes"),
        ("true: 2", "f.yaml:1:1: the key true must be text"),
        ("? [a]\n: 2", "f.yaml:1:3: the key here must be text"),
        ("a: !!python/object:os.system x", "f.yaml:1:4: tag tag:yaml.org,2002:python/object"),
        ("a: !mine {b: 1}", "f.yaml:1:4: tag !mine is not supported"),
        ("a: *b", "undefined alias"),
        ("a: &a [*a]", "f.yaml:1:4: an anchor contains itself"),
        ("---\na: 1\n---\nb: 1", "f.yaml:3:1: not valid YAML: but found another document"),
        ("a: \x07", "f.yaml:1: not valid YAML: control characters are not allowed"),
        ("a: !!int x", "not valid YAML"),
        ("a: " + "9" * 5000, "not valid YAML"),
        ("a: " + "[" * 5000, "not valid YAML"),
    ],
)
def test_bad_input_gets_file_line_and_column(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert message in str(error.value)
    assert str(error.value).startswith("f.yaml")
    assert "\n" not in str(error.value)


def test_anchor_bomb_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_text, "MAX_VALUES", 1000)
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="more than 1000 values"):
        parse("a0: &a0 [x]\n" + "\n".join(levels))


def test_bomb_of_merged_mappings_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_text, "MAX_VALUES", 1000)
    merged = [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 9)]
    with pytest.raises(ConfigError, match=r"f\.yaml:\d+:\d+: .*more than 1000 values"):
        parse("a0: &a0 {x: 1}\n" + "\n".join(merged))


DATA = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.from_regex(r"[-+.0-9eExXo_:~yYnNtTfF<=]{1,8}", fullmatch=True),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(DATA)
def test_dumped_data_loads_equal(data: Any) -> None:
    again = parse(dump_yaml(data))
    assert again == data
    assert repr(again) == repr(data)


@given(DATA)
def test_other_readers_load_the_same(data: Any) -> None:
    """YAML 1.1 readers (PyYAML itself) read the same from what we write."""
    assert yaml.safe_load(dump_yaml(data)) == data


@pytest.mark.parametrize("text", ["a: \xe4\n", "\ufeffa: \xe4\n"])
def test_files_are_read_as_utf8(tmp_path: Path, text: str) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(text, encoding="utf-8")
    assert parse(read_text(path)) == {"a": "\xe4"}


def test_unreadable_files_are_named_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: no such configuration file"):
        read_text(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        read_text(tmp_path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: \xe4")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(byte 3\)"):
        read_text(latin)
