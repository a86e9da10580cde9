"""ps.json: one line per error, all at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hps.config import load_config
from hps.config.ps_json.keys import KEYS
from hps.errors import ConfigError

Ps = Any
PAGE = Path(__file__).parents[3] / "docs" / "ps-json.md"


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("supportlonglong", 1, ": supportlonglong: expected true or false, found 1"),
        ("volatile_db", [], ": volatile_db: expected a mapping, found []"),
        (
            "volatile_db.password",
            123456,
            ": volatile_db.password: expected text, found a number (not",
        ),
        (
            "volatile_db.update_filters",
            ["a", 1],
            ": volatile_db.update_filters: expected a list of te",
        ),
        (
            "persistent_db.num_threads",
            -4,
            ": persistent_db.num_threads: expected a whole number from",
        ),
        (
            "persistent_db.path",
            "s3://b/x",
            ": persistent_db.path: is s3://b/x: remote locations are",
        ),
        ("models", [], ": models: is empty; expected at least one model"),
        ("models", {}, ": expected"),
        ("models", [1], ": models: expected a list of mappings, found [1]"),
        ("models[].model", "", ": models[0].model: expected text of 1 to 120 of the characters"),
        ("models[].model", "a.b", ": models[0].model: expected text of 1 to 120 of the characters"),
        (
            "models[].sparse_files",
            [],
            ": models[0].sparse_files: is empty; expected one folder per",
        ),
        (
            "models[].sparse_files",
            ["hdfs://n/t0", "t1"],
            ": models[0].sparse_files: [0] is hdfs://n/t0: remote locations are not supported",
        ),
        (
            "models[].embedding_vecsize_per_table",
            [4],
            ": models[0].embedding_vecsize_per_table: has 1 entries, but sparse_files names 2 tables",
        ),
        (
            "models[].embedding_vecsize_per_table",
            [4, 0],
            ": models[0].embedding_vecsize_per_table[1]: expected a whole number from 1 to 65536",
        ),
        (
            "models[].embedding_vecsize_per_table",
            [4, 1.5],
            ": models[0].embedding_vecsize_per_table: expected a list of whole numbers from 0, found",
        ),
        (
            "models[].embedding_table_names",
            ["a", "a"],
            ": models[0].embedding_table_names[1]: two tables are called 'a'",
        ),
        (
            "models[].embedding_table_names",
            ["a", "b c"],
            ": models[0].embedding_table_names[1]: expected text of 1 to 120 of the characters",
        ),
        (
            "models[].default_value_for_each_table",
            [1, 2, 3],
            ": models[0].default_value_for_each_table: has 3 entries, but sparse_files names 2",
        ),
        (
            "models[].maxnum_catfeature_query_per_table_per_sample",
            [1],
            ": models[0].maxnum_catfeature_query_per_table_per_sample: has 1 entries, but",
        ),
        (
            "models[].max_batch_size",
            0,
            ": models[0].max_batch_size: expected a whole number from 1",
        ),
        (
            "models[].gpucacheper",
            -0.5,
            ": models[0].gpucacheper: expected a number from 0, found -0.5",
        ),
    ],
)
def test_each_mistake_is_one_line_with_place_and_remedy(
    ps: Ps, key: str, value: Any, line: str
) -> None:
    mistakes = ps.mistakes(ps.put(key, value) if key != "models" else {**ps.base, "models": value})
    if line == ": expected":
        assert "looks like a configuration of ours" in mistakes[0]
        return
    assert len(mistakes) == 1, mistakes
    assert mistakes[0].startswith(line)
    assert "123456" not in mistakes[0]


def test_all_mistakes_are_reported_at_once(ps: Ps) -> None:
    ps.base["supportlonglong"] = "yes"
    ps.base["persistent_db"]["type"] = "rock"
    ps.base["models"][0] |= {"hit_rate_threshold": "x", "embedding_table_names": ["a"]}
    ps.base["models"].append({"model": "n"})
    assert [line.split(": ")[1] for line in ps.mistakes(ps.base)] == [
        "supportlonglong",
        "persistent_db.type",
        "models[0].hit_rate_threshold",
        "models[1].sparse_files",
        "models[1].embedding_vecsize_per_table",
        "models[0].embedding_table_names",
    ]


def test_two_models_of_one_name_are_rejected(ps: Ps) -> None:
    assert ps.mistakes({**ps.base, "models": ps.base["models"] * 2}) == [
        ": models[1].model: 'm' is the name of models[0] too"
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ":1:1: not valid JSON: Expecting value"),
        ('{"models": [\n}', ":2:1: not valid JSON: Expecting value"),
        ('{"models": 1, "models": 2}', ": key 'models' is duplicate in the same mapping"),
        ('{"supportlonglong": NaN}', ": not valid JSON: NaN is no number"),
        ("[]", ": expected a mapping, found []"),
        ("[" * 100_000, ": not valid JSON: nested too deeply"),
        ('{"server": {}}', ": a .json file is read as HPS's ps.json, but this looks like a config"),
        ("{}", ": models: is missing; expected a list of mappings"),
    ],
)
def test_files_that_are_not_a_ps_json_are_rejected(ps: Ps, text: str, line: str) -> None:
    (mistake,) = ps.mistakes(text)
    assert mistake.startswith(line)


def test_every_rejected_number_is_in_the_page(ps: Ps) -> None:
    """HPS accepts most numbers, so the page must name every rejected number."""
    ps.base["volatile_db"]["type"] = "redis_cluster"
    ps.base["update_source"] = {"type": "kafka"}
    rejected = set()
    for key in KEYS:
        numbers: list[Any] = [0, 1, 100, 10**6, 2**64 - 1]
        if key.kind == "float":
            numbers = [-1, 0, 1.5, 100]
        elif key.kind == "list" and key.items == "int":
            numbers = [[number] * 2 for number in numbers]
        elif key.kind != "int":
            continue
        for number in numbers:
            ps.path.write_text(json.dumps(ps.put(key, number)))
            try:
                load_config(ps.path, environ={})
            except ConfigError:
                rejected.add(key.name)
    text = PAGE.read_text().partition("Rejected, with exit code 2")[2].partition("<!--")[0]
    assert sorted(name for name in rejected if f"`{name}`" not in text) == []
    assert "num_of_worker_buffer_in_pool" not in rejected
