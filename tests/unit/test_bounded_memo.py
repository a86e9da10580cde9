"""Dicts that do not grow without bound."""

from hps.bounded_memo import memoize


def test_memo_is_emptied_before_it_exceeds_its_limit():
    memo = {}
    assert memoize(memo, "a", 1, 2) == 1
    memoize(memo, "b", 2, 2)
    assert memo == {"a": 1, "b": 2}
    memoize(memo, "c", 3, 2)
    assert memo == {"c": 3}
