"""Every tier rejects arrays of a wrong shape or dtype before it writes anything."""

import numpy as np
import pytest

from hps.errors import BadRequest
from hps.tiers.base import FetchContext, Part
from hps.types import version_now
from tests.support.rows import rows_from


def hold_two_rows(tier, table):
    """Insert keys 1 and 2 with versions a day old."""
    versions = np.full(2, version_now() - (86_400_000 << 20), np.uint64)
    tier.insert(table, np.array([1, 2]), rows_from(table, 1, 2), versions)


def part_of_two(table):
    return Part.make(table, np.array([1, 2]), np.full((2, table.dim), 7, table.dtype))


BAD_PARTS = {
    "out of another dim": (lambda p: setattr(p, "out", np.zeros((2, 9), p.out.dtype)), "(2, 9)"),
    "too few rows": (lambda p: setattr(p, "out", p.out[:1]), "(1, 4)"),
    "another dtype": (lambda p: setattr(p, "out", p.out.astype(np.int8)), "int8"),
    "strided out": (lambda p: setattr(p, "out", np.repeat(p.out, 2, 1)[:, ::2]), "contiguous"),
    "read-only out": (lambda p: p.out.setflags(write=False), "read-only"),
    "too few versions": (lambda p: setattr(p, "versions", p.versions[:1]), "(1,)"),
    "signed versions": (lambda p: setattr(p, "versions", p.versions.view(np.int64)), "int64"),
    "too many sources": (lambda p: setattr(p, "source", np.zeros(3, np.uint8)), "(3,)"),
    "32-bit keys": (lambda p: setattr(p, "keys", p.keys.astype(np.int32)), "int32"),
    "strided keys": (lambda p: setattr(p, "keys", np.repeat(p.keys, 2)[::2]), "contiguous"),
    "a list of keys": (lambda p: setattr(p, "keys", [1, 2]), "list"),
}


@pytest.mark.parametrize(("spoil", "named"), BAD_PARTS.values(), ids=BAD_PARTS)
def test_part_with_wrong_arrays_is_rejected(under_test, spoil, named):
    tier, table = under_test.tier, under_test.tables[0]
    hold_two_rows(tier, table)
    part = part_of_two(table)
    spoil(part)
    before = part.out.tolist(), part.versions.tolist(), part.source.tolist()
    with pytest.raises(BadRequest) as error:
        tier.fetch([part], FetchContext())
    assert named in str(error.value)
    assert table.id in str(error.value)
    assert before == (part.out.tolist(), part.versions.tolist(), part.source.tolist())
    assert part.missing.tolist() == [0, 1]


def test_message_names_expected_and_actual_shapes(under_test):
    tier, table = under_test.tier, under_test.tables[0]
    hold_two_rows(tier, table)
    part = part_of_two(table)
    part.out = np.zeros((2, 9), table.dtype)
    with pytest.raises(BadRequest, match=r"\(2, 4\).*\(2, 9\)"):
        tier.fetch([part], FetchContext())
    with pytest.raises(BadRequest, match=r"\(2, 4\).*\(2, 9\)"):
        tier.insert(table, part.keys, part.out, part.versions)


VERBS = {
    "insert": ("keys", "vectors", "versions"),
    "update": ("keys", "vectors", "versions"),
    "delete": ("keys", "versions"),
    "evict": ("keys",),
}
BAD_ARRAYS = {
    "another dim": ("vectors", lambda a: np.zeros((2, 5), a.dtype), "(2, 5)"),
    "too few rows": ("vectors", lambda a: a[:1], "(1, 4)"),
    "another dtype": ("vectors", lambda a: a.astype(np.float64), "float64"),
    "strided rows": ("vectors", np.asfortranarray, "contiguous"),
    "too many versions": ("versions", lambda _: np.zeros(3, np.uint64), "(3,)"),
    "signed versions": ("versions", lambda a: a.view(np.int64), "int64"),
    "two-dimensional keys": ("keys", lambda a: a[None], "(1, 2)"),
    "unsigned keys": ("keys", lambda a: a.view(np.uint64), "uint64"),
    "strided keys": ("keys", lambda a: np.repeat(a, 2)[::2], "contiguous"),
}
COMBINED = [
    pytest.param(verb, *bad, id=f"{verb}, {name}")
    for verb, accepted in VERBS.items()
    for name, bad in BAD_ARRAYS.items()
    if bad[0] in accepted
]


@pytest.mark.parametrize(("verb", "name", "spoil", "named"), COMBINED)
def test_rows_with_wrong_arrays_are_rejected(under_test, verb, name, spoil, named):
    tier, table = under_test.tier, under_test.tables[0]
    hold_two_rows(tier, table)
    arrays = {
        "keys": np.array([1, 2]),
        "vectors": rows_from(table, 8, 9),
        "versions": np.full(2, version_now(), np.uint64),
    }
    arrays[name] = spoil(arrays[name])
    with pytest.raises(BadRequest) as error:
        getattr(tier, verb)(table, **{accepted: arrays[accepted] for accepted in VERBS[verb]})
    assert named in str(error.value)
    assert table.id in str(error.value)
    part = part_of_two(table)
    tier.fetch([part], FetchContext())
    assert part.out.tolist() == rows_from(table, 1, 2).tolist()
    assert len(part.missing) == 0
