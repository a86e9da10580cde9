"""Single flight's table, compiled and its twin: who reads a key, and where its row will stand."""

import threading

import numpy as np
import pytest

from hps import native
from hps.native import twin_in_flight


@pytest.fixture(params=[native.InFlight, twin_in_flight.InFlight], ids=["native", "twin"])
def table(request):
    return request.param()


def claim(table, number, *keys, missing=None, now=0.0):
    """Of one table, whose number is 7: the positions left to read and, by fetch, what is left to it."""
    at = np.arange(len(keys)) if missing is None else np.array(missing)
    own, shares = table.claim(number, [7], [np.array(keys, np.int64)], [at], now)
    assert all((ask, of) == (0, 0) for _, ask, of, _, _ in shares)
    left = {
        n: list(zip(mine.tolist(), places.tolist(), strict=True)) for n, *_, mine, places in shares
    }
    return own[0].tolist(), left


def landed(table, number, until=0.0):
    return [each.tolist() for each in table.land(number, until)]


def test_a_key_is_read_by_the_first_that_asks_for_it(table):
    assert claim(table, 1, 10, 20, 30, missing=[0, 2]) == ([0, 2], {})
    assert claim(table, 2, 30, 20, 10) == ([1], {1: [(0, 0), (2, 1)]})
    assert claim(table, 3, 10, 20, 40) == ([2], {1: [(0, 1)], 2: [(1, 0)]})
    assert landed(table, 1) == [[2, 0]]
    assert landed(table, 2) == [[1]]
    assert landed(table, 3) == []
    assert [table.leave(n) for n in (1, 1, 2)] == [False, True, True]
    assert len(table) == 0


def test_tables_are_kept_apart(table):
    keys, at = np.arange(3), np.arange(3)
    table.claim(1, [2**64 - 1, 4], [keys, keys + 1], [at, at], 0.0)
    own, shares = table.claim(2, [4, 5], [keys, keys], [at, at], 0.0)
    assert [each.tolist() for each in own] == [[0], [0, 1, 2]]
    ((number, ask, of, mine, places),) = shares
    assert (number, ask, of, mine.tolist(), places.tolist()) == (1, 0, 1, [1, 2], [0, 1])
    assert landed(table, 1) == [[], [0, 1]]


def test_what_nobody_waits_for_is_forgotten_at_the_end(table):
    claim(table, 1, 5)
    assert len(table) == 1
    assert landed(table, 1, until=9.0) == []
    assert len(table) == 0
    assert claim(table, 2, 5) == ([0], {})


def test_an_answer_may_be_joined_for_a_while_by_those_who_want_what_is_kept(table):
    claim(table, 1, 5, 6)
    claim(table, 2, 6)
    assert landed(table, 1, until=2.0) == [[1]]
    assert claim(table, 3, 5, 6, now=1.0) == ([0], {1: [(1, 0)]})
    assert claim(table, 4, 6, now=2.0) == ([0], {})
    assert claim(table, 5, 6, now=1.0) == ([], {4: [(0, 0)]})
    assert [table.leave(1), table.leave(1)] == [False, True]


def test_who_raised_is_not_followed_any_more(table):
    claim(table, 1, 5)
    claim(table, 2, 5, 6)
    landed(table, 1, until=0.0)
    assert claim(table, 3, 5, 7) == ([0, 1], {})


def test_a_key_left_to_another_fetch_is_not_read_here(table):
    claim(table, 1, 5)
    claim(table, 2, 5, 6)
    assert table.leave(1) is False
    assert landed(table, 1) == []
    assert claim(table, 3, 5, 6) == ([0], {2: [(1, 0)]})


def test_of_fetches_with_few_keys_in_common_the_oldest_is_followed(table):
    claim(table, 9, *range(100))
    claim(table, 8, *range(100, 200))
    claim(table, 7, *range(200, 300))
    own, left = claim(table, 6, 50, 150, 151, *range(200, 232), *range(1000, 1100))
    assert own == [1, 2, *range(35, 135)]
    assert {n: len(pairs) for n, pairs in left.items()} == {9: 1, 7: 32}
    own, left = claim(table, 5, 150, *range(2000, 2999))  # read by 8 still, not by 6
    assert (own[0], list(left)) == (1, [8])


def test_a_much_larger_read_is_not_waited_for(table):
    claim(table, 1, *range(8001))
    assert claim(table, 2, 5, *range(9000, 9999))[1] == {}
    assert claim(table, 3, 5, *range(10_000, 11_001))[1] == {
        2: [(0, 0)]
    }  # who reads less has it now
    assert claim(table, 4, 6, *range(12_000, 13_001))[1] == {1: [(0, 0)]}


def test_a_key_that_stands_twice_does_not_follow_itself(table):
    assert claim(table, 1, 5, 5) == ([0, 1], {})
    assert claim(table, 2, 5) == ([], {1: [(0, 0)]})


def test_wrong_arguments_are_refused_and_leave_nothing(table):
    claim(table, 1, 5)
    with pytest.raises(ValueError, match="in use"):
        claim(table, 1, 6)
    with pytest.raises(ValueError, match="in flight"):
        table.land(2, 0.0)
    for number in (1, 2):
        with pytest.raises(ValueError, match="follows"):
            table.leave(number)
    assert len(table) == 1


@pytest.mark.skipif(not native.COMPILED, reason="the twin trusts its arguments")
@pytest.mark.parametrize("missing", [[1], [-1]])
def test_positions_beyond_the_keys_are_refused(missing):
    table = native.InFlight()
    with pytest.raises(ValueError, match="positions of keys"):
        claim(table, 1, 5, missing=missing)
    with pytest.raises(ValueError, match="one array per table"):
        table.claim(1, [1, 2], [np.arange(3)], [np.arange(3)], 0.0)
    with pytest.raises(TypeError):
        table.claim(1, [1], [np.arange(3, dtype=np.int32)], [np.arange(3)], 0.0)
    assert claim(table, 1, 5) == ([0], {})


@pytest.mark.parametrize("seed", range(20))
def test_the_twins_agree(seed):
    """Whatever is begun, ended and left, in whatever order; with claims that make the table grow."""
    random = np.random.default_rng(seed)
    twins = [native.InFlight(), twin_in_flight.InFlight()]
    flying, followed = [], []

    def pick(some):
        return some.pop(random.integers(len(some)))

    for now in range(60):
        verb = random.integers(3)
        if verb == 0:
            tables = random.permutation(4)[: random.integers(1, 4)].tolist()
            size = random.choice([5, 50, 300, 6000 if seed < 5 else 300])
            keys = [random.permutation(2 * size)[:size] for _ in tables]
            missing = [np.flatnonzero(random.random(size) < 0.8) for _ in tables]
            claims = [each.claim(now, tables, keys, missing, float(now)) for each in twins]
            shown = [
                (
                    [a.tolist() for a in own],
                    [(*s[:3], s[3].tolist(), s[4].tolist()) for s in shares],
                )
                for own, shares in claims
            ]
            assert shown[0] == shown[1]
            flying.append(now)
            followed += {number for number, *_ in shown[0][1]}
        elif verb == 1 and flying:
            number, until = pick(flying), float(now + random.integers(-2, 9))
            assert landed(twins[0], number, until) == landed(twins[1], number, until)
        elif followed:
            number = pick(followed)
            assert twins[0].leave(number) == twins[1].leave(number)
        assert len(twins[0]) == len(twins[1])
    for number in flying:
        assert landed(twins[0], number) == landed(twins[1], number)
    for number in followed:
        assert twins[0].leave(number) == twins[1].leave(number)
    assert len(twins[0]) == len(twins[1]) == 0


def test_threads_that_claim_at_once_share_every_key_out(table):
    """However the calls meet: those that hold the GIL, and the large ones that do not."""
    keys = [np.arange(n, n + size) for n, size in enumerate([10, 5000, 200, 9000] * 2)]
    begin, claims = threading.Barrier(len(keys)), {}

    def work(number):
        begin.wait(60)
        at = np.arange(len(keys[number]))
        claims[number] = table.claim(number, [1], [keys[number]], [at], 0.0)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(keys))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    followed = []
    for number, (own, shares) in claims.items():
        mine = np.concatenate([*own, *(share[3] for share in shares)])
        assert np.sort(mine).tolist() == list(range(len(keys[number])))
        followed += {share[0] for share in shares}
    kept = {number: table.land(number, 0.0) for number in claims}
    for number, (_, shares) in claims.items():
        for other, _, of, mine, places in shares:
            there = keys[other][kept[other][of][places]]
            assert there.tolist() == keys[number][mine].tolist()
    for number in followed:
        table.leave(number)
    assert len(table) == 0
