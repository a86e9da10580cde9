"""Parsing and formatting of keys, vectors, versions and times in hps store."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hps.cli.main import app
from hps.cli.value_parsing import (
    as_typed,
    key_array,
    parse_key,
    parse_vector,
    parse_version,
    shown_age,
    shown_vector,
)
from hps.errors import ConfigError
from hps.types import EmbeddingTable, make_version

TABLE = EmbeddingTable.make("t", 3)
PAGE = Path(__file__).parents[3] / "docs" / "command-line.md"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("7", 7),
        ("-9223372036854775808", -(2**63)),
        ("18446744073709551615", -1),
        ("0xff", 255),
        ("0XFF", 255),
        ("-0x10", -16),
        ("0xFFFFFFFFFFFFFFFF", -1),
        ("007", 7),
    ],
)
def test_keys_are_parsed_to_int64(text: str, key: int) -> None:
    assert parse_key(text) == key
    assert as_typed(text) & (2**64 - 1) == key & (2**64 - 1)


@pytest.mark.parametrize("text", ["", "x", "0x", "ff", "1e3", "0x1ffffffffffffffff", "1.0"])
def test_invalid_keys_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="key"):
        parse_key(text)


def test_table_keys_are_distinct_and_have_its_width() -> None:
    narrow = EmbeddingTable.make("t", 3, key_bits=32)
    assert key_array(TABLE, [3, 1, 3]).tolist() == [3, 1]
    assert key_array(narrow, [-1]).tolist() == [2**32 - 1]


@pytest.mark.parametrize("text", ["1,-2,0.5", "[1, -2, 0.5]", " 1 -2 .5 "])
def test_vectors_are_parsed(text: str) -> None:
    assert parse_vector(text, TABLE).tolist() == [[1, -2, 0.5]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2", "2 values, table model/1/t has dim 3"),
        ("", "0 values"),
        ("1,2,a", "give numbers with commas"),
        ("1,2,inf", "no finite float32"),
        ("1,2,1e39", "no finite float32"),
    ],
)
def test_invalid_vectors_are_rejected(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_vector(text, TABLE)


def test_vectors_beyond_float16_are_rejected() -> None:
    half = EmbeddingTable.make("t", 1, dtype=np.float16)
    assert parse_vector("65504", half).dtype == np.float16
    with pytest.raises(ConfigError, match="no finite float16"):
        parse_vector("65536", half)


def test_versions_and_times_are_parsed() -> None:
    assert parse_version("18446744073709551615") == 2**64 - 1
    noon = make_version(1_769_860_800_000)
    assert parse_version("2026-01-31T12:00Z") == noon
    assert parse_version("2026-01-31T12:00") == noon
    assert parse_version("2026-01-31T14:00+02:00") == noon
    for text in ("18446744073709551616", "tomorrow", "-3", "", "1960-01-01", "9999-01-01", "²"):
        with pytest.raises(ConfigError, match="version"):
            parse_version(text)


def test_vectors_and_ages_are_formatted() -> None:
    assert shown_vector(np.arange(3.0)) == "0 1 2"
    assert shown_vector(np.arange(9.0)) == "0 1 2 3 4 5 6 7 … (9 values)"
    assert shown_age(make_version(int(time.time() * 1000) - 5000)) in ("5 s", "6 s")
    assert shown_age(0) == shown_age(make_version(1)) == "-"


def test_every_store_command_is_in_the_page() -> None:
    listed = CliRunner().invoke(app, ["store", "--help"]).stdout.split("Commands:")[1]
    names = {line.split()[0] for line in listed.splitlines() if line.strip()}
    table = PAGE.read_text().split("## The stores")[1]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {part.strip(" `").split()[0] for cell in first for part in cell.split("`, `")}
    assert documented == names
