"""model.yaml: reading, writing, checks and overrides."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.config import ModelSpec, apply_override, dump_model_spec, load_model_spec
from hps.config.model_schema import TableSpec
from hps.config.schema import ModelOverride
from hps.errors import ConfigError

GOOD = """\
name: ctr
tables:
  - {name: user, dim: 4, default: [0.1, 0.2, 0.3, 0.4]}
  - {name: url, dim: 2, dtype: float16, miss_policy: {kind: default_then_promote, min_hit_rate: 0.9}}
features:
  - {name: user_id, table: user, context: true}
  - {name: shown_url, table: url, pooling: none}
  - {name: clicked_urls, table: url, key_offset: -1, pooling: mean}
dense:
  inputs: [{name: position, shape: [-1, 1]}]
  embeddings: {user_id: user_vector}
  outputs: [{name: click, shape: [-1, 1]}, {name: buy, shape: [-1]}]
  ranking_output: buy
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.yaml"


def mistakes(path: Path, text: str) -> list[str]:
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_model_spec(path)
    return str(error.value).splitlines()


def test_valid_description_is_read(path: Path) -> None:
    path.write_text(GOOD)
    spec = load_model_spec(path)
    assert [t.dim for t in spec.tables] == [4, 2]
    assert spec.features[2].key_offset == -1
    assert spec.dense is not None
    assert spec.dense.embeddings == {"user_id": "user_vector"}


MISTAKES = [
    ("user, dim: 4,", "user, dim: 3,", ":3: tables[0].default: has 4 values, but dim is 3"),
    (
        "name: url, dim",
        "name: user, dim",
        ":4: tables[1].name: two tables are called 'user' (tables",
    ),
    (
        "table: user,",
        "table: users,",
        ":6: features[0].table: feature 'user_id' uses table 'users', ",
    ),
    (
        "table: user,",
        "table: [user, users],",
        ":6: features[0].table: feature 'user_id' uses table 'users', ",
    ),
    ("table: user,", "table: [user, user],", ":6: features[0].table[1]: names table 'user' twice"),
    (
        "table: user,",
        "table: [user, url],",
        ":11: dense.embeddings.user_id: names feature 'user_id', which does not exist; did you mean",
    ),
    (
        "name: clicked_urls",
        "name: user_id",
        ":8: features[2].name: two features are called 'user_id'",
    ),
    (
        "{user_id: user_vector}",
        "{user_ids: user_vector}",
        ":11: dense.embeddings.user_ids: names feature 'user_ids', which does not exist; did you mean",
    ),
    (
        "{user_id: user_vector}",
        "{user_id: x, shown_url: x}",
        ":11: dense.embeddings.shown_url: network input 'x' already receives feature 'user_id'",
    ),
    (
        "{user_id: user_vector}",
        "{user_id: position}",
        ":11: dense.embeddings.user_id: network input 'position' already receives an input of the request",
    ),
    ("name: position", "name: user_id", ":10: dense.inputs[0].name: input 'user_id' has the name"),
    (
        "name: position",
        "name: user_id.weights",
        ":10: dense.inputs[0].name: input 'user_id.weights'",
    ),
    (
        "ranking_output: buy",
        "ranking_output: bye",
        ":13: dense.ranking_output: is 'bye', which is not an output; did you mean 'buy'?",
    ),
    ("name: buy", "name: click", ":12: dense.outputs[1].name: two outputs are called 'click'"),
    (
        "shape: [-1, 1]}]",
        "shape: [-1, 0]}]",
        ":10: dense.inputs[0].shape[1]: expected -1 or a number",
    ),
    (
        "shape: [-1, 1]}]",
        "shape: []}]",
        ":10: dense.inputs[0].shape: is empty; the first dimension",
    ),
    (
        "dtype: float16",
        "default: 70000, dtype: float16",
        ":4: tables[1].default: does not fit float16",
    ),
    (
        "min_hit_rate: 0.9",
        "min_hit_rate: 1.9",
        ":4: tables[1].miss_policy.min_hit_rate: expected a ",
    ),
    (
        "kind: default_then_promote",
        "kind: wait",
        ":4: tables[1].miss_policy.min_hit_rate: needs kind",
    ),
    (
        "key_offset: -1",
        "key_offset: 1.5",
        ":8: features[2].key_offset: expected a whole number from",
    ),
    (
        "key_offset: -1",
        "hotness: 5, max_hotness: 3",
        ":8: features[2].max_hotness: is 3, but hotness",
    ),
    (
        "pooling: none",
        "pooling: max",
        ":7: features[1].pooling: expected sum, mean, sqrtn or none, found",
    ),
    ("pooling: none", "max_norm: 0", ":7: features[1].max_norm: expected a number above 0"),
    (
        "pooling: none",
        "pooling: none, truncation: keep_last",
        ":7: features[1].truncation: is keep_last, but max_length is not set",
    ),
    (
        "pooling: none",
        "pooling: none, hotness: 2, max_length: 3",
        ":7: features[1].max_length: is for any number of keys per sample, but hotness is 2",
    ),
    (
        "pooling: mean",
        "pooling: mean, max_length: 3",
        ":8: features[2].max_length: pads vectors that are not pooled, but pooling is mean",
    ),
    (
        "pooling: none",
        "pooling: none, max_length: 0",
        ":7: features[1].max_length: expected a whole number from 1 to 1000000",
    ),
    (
        "{user_id: user_vector}",
        "{user_id: user_vector}\n  masks: {shown_url: m}",
        ":12: dense.masks.shown_url: names feature 'shown_url', which has no max_length",
    ),
    (
        "{user_id: user_vector}",
        "{user_id: user_vector}\n  lengths: {shown: m}",
        ":12: dense.lengths.shown: names feature 'shown', which does not exist",
    ),
    (
        "{user_id: user_vector}",
        "{user_id: user_vector}\n  masks: {shown_url: user_vector}",
        ":12: dense.masks.shown_url: network input 'user_vector' already receives feature 'user_id'",
    ),
    ("dim: 2", "dim: 0", ":4: tables[1].dim: expected a whole number from 1 to 65536, found 0"),
    (
        "name: ctr",
        "name: a/b",
        ":1: name: expected text of 1 to 120 of the characters a-z A-Z 0-9 _ -",
    ),
    ("dim: 2", "dim: 2, dim: 2", ":4:25: duplicate key 'dim', also on line 4"),
    ("name: ctr", "nam: ctr", ":1: nam: unknown key; did you mean 'name'?"),
    ("name: ctr\n", "", ": name: is missing; expected text of 1 to 120"),
]


@pytest.mark.parametrize(("old", "new", "line"), MISTAKES, ids=[new for _, new, _ in MISTAKES])
def test_each_mistake_is_one_line_with_place_and_remedy(
    path: Path, old: str, new: str, line: str
) -> None:
    assert old in GOOD
    found = mistakes(path, GOOD.replace(old, new, 1))
    assert any(one.startswith(f"{path}{line}") for one in found), found
    # Everything that uses a removed name reports it.
    assert len(found) == {
        "nam: ctr": 2,
        "name: user, dim": 3,
        "name: click": 2,
        "table: [user, users],": 2,
    }.get(new, 1), found


def test_mistakes_at_every_level_are_reported_at_once(path: Path) -> None:
    text = GOOD.replace("table: user,", "table: users,").replace("buy\n", "bye\n")
    found = mistakes(path, text + "x: 1\n")
    assert [line.split(": ")[1] for line in found] == [
        "features[0].table",
        "dense.ranking_output",
        "x",
    ]
    # Which tables there are cannot be judged while one of them is wrong.
    found = mistakes(path, text.replace("dim: 2", "dim: x"))
    assert [line.split(": ")[1] for line in found] == ["tables[1].dim", "dense.ranking_output"]


def test_empty_or_non_mapping_file_is_rejected(path: Path) -> None:
    assert len(mistakes(path, "")) == 2
    assert mistakes(path, "- a") == [f"{path}: expected a mapping with name, tables, features, dense, "
                                     "max_batch_size, hps_version, found ['a']"]  # fmt: skip


def test_preprocessing_is_rejected(path: Path) -> None:
    """No part of hps implements it."""
    text = "name: m\ntables: [{name: t, dim: 1}]\npreprocess: {x: {log1p: true}}\n"
    (found,) = mistakes(path, text)
    assert "preprocess: unknown key" in found


def test_embeddings_may_name_the_default_features(path: Path) -> None:
    """Without features there is one per table, with the table's name."""
    text = (
        "name: m\ntables: [{name: t, dim: 1}]\n"
        "dense: {embeddings: {t: x}, outputs: [{name: y, shape: [-1]}]}"
    )
    path.write_text(text)
    assert load_model_spec(path).dense is not None
    assert "dense.embeddings.u" in mistakes(path, text.replace("{t: x}", "{u: x}"))[0]


NAMES = st.from_regex(r"[a-zA-Z0-9_\-]{1,12}", fullmatch=True)


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    floats = st.floats(-60_000, 60_000)
    tables = []
    for name in draw(st.lists(NAMES, min_size=1, max_size=4, unique=True)):
        dim = draw(st.integers(1, 4))
        tables.append(
            {
                "name": name,
                "dim": dim,
                "dtype": draw(st.sampled_from(["float32", "float16"])),
                "key_dtype": draw(st.sampled_from(["int64", "uint32"])),
                "default": draw(floats | st.lists(floats, min_size=dim, max_size=dim)),
                "tombstone_ttl_s": draw(st.floats(0, 1e9)),
                "ttl_s": draw(st.none() | st.floats(1e-3, 1e9)),
            }
        )
    features = [
        {
            "name": name,
            "table": draw(st.sampled_from([t["name"] for t in tables])),
            "key_offset": draw(st.integers(-(2**63), 2**64 - 1)),
            "pooling": draw(st.sampled_from(["sum", "mean", "sqrtn", "none"])),
            "context": draw(st.booleans()),
        }
        for name in draw(st.lists(NAMES, max_size=4, unique=True))
    ]
    data: dict[str, Any] = {"name": draw(NAMES), "tables": tables, "features": features}
    if draw(st.booleans()):
        outputs = draw(
            st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3, unique=True)
        )
        data["dense"] = {"outputs": [{"name": o, "shape": [-1, 3]} for o in outputs]}
    return ModelSpec.model_validate(data)


@given(specs())
def test_dumped_description_loads_equal(tmp_path_factory: Any, spec: ModelSpec) -> None:
    path = tmp_path_factory.mktemp("spec") / "model.yaml"
    path.write_text(dump_model_spec(spec))
    assert load_model_spec(path) == spec


@pytest.mark.alone
def test_two_thousand_tables_are_read_quickly(path: Path) -> None:
    tables = [TableSpec(name=f"table{i}", dim=16, default=0.5) for i in range(2000)]
    path.write_text(dump_model_spec(ModelSpec(name="big", tables=tables)))
    began = time.process_time()
    assert len(load_model_spec(path).tables) == 2000
    assert time.process_time() - began < 3


# -- overrides -----------------------------------------------------------------------------------


@pytest.fixture
def spec(path: Path) -> ModelSpec:
    path.write_text(GOOD)
    return load_model_spec(path)


def override(**data: Any) -> ModelOverride:
    return ModelOverride.model_validate(data)


def test_no_override_keeps_the_description(spec: ModelSpec) -> None:
    assert apply_override(spec, None) is spec
    assert apply_override(spec, override(version=3)) == spec


def test_override_replaces_parts_of_the_description(spec: ModelSpec) -> None:
    changed = apply_override(
        spec,
        override(
            max_batch_size=7,
            tables={"user": {"default": 1.5, "miss_policy": {"kind": "default_then_promote"}}},
            dense={"outputs": [{"name": "only", "shape": [-1]}]},
        ),
    )
    assert changed.max_batch_size == 7
    assert changed.tables[0].default == 1.5
    assert changed.tables[0].miss_policy.kind == "default_then_promote"
    assert changed.tables[1] == spec.tables[1]
    assert changed.dense is not None
    assert [o.name for o in changed.dense.outputs] == ["only"]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (
            {"tables": {"usr": {"default": 1}}},
            "models.serve.ctr.tables.usr: model 'ctr' has no table 'usr'; did you mean 'user'?",
        ),
        (
            {"tables": {"user": {"default": [1.0, 2.0]}}},
            "models.serve.ctr.tables.user: tables[0].default: has 2 values, but dim is 4",
        ),
        (
            {"dense": {"outputs": [{"name": "y", "shape": [-1]}], "embeddings": {"nobody": "x"}}},
            "models.serve.ctr: dense.embeddings.nobody: names feature 'nobody', which does not exist",
        ),
    ],
)
def test_inconsistent_override_is_rejected(
    spec: ModelSpec, data: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as error:
        apply_override(spec, override(**data))
    assert str(error.value).startswith(line)


def test_padded_feature_reserves_the_names_of_its_outputs(path: Path) -> None:
    text = (
        "name: m\ntables: [{name: mask, dim: 1}, {name: wide, dim: 1}]\n"
        "features: [{name: f, table: [mask, wide], pooling: none, max_length: 3}]\n"
    )
    assert "'<feature>.mask', which is reserved" in mistakes(path, text)[0]
    path.write_text(text.replace(", max_length: 3", ""))
    assert load_model_spec(path).features[0].vectors == {"f.mask": "mask", "f.wide": "wide"}
