"""The table of keys in flight, compiled and twin: the fetch that reads a key, and the place of its row."""

import threading

import numpy as np
import pytest

from hps import native
from hps.native import twin_in_flight


@pytest.fixture(params=[native.InFlight, twin_in_flight.InFlight], ids=["native", "twin"])
def table(request):
    return request.param()


def claim(table, number, *keys, missing=None, now=0.0):
    """Claim keys of table 7; return the positions to read and (position, place) pairs per followed fetch."""
    at = np.arange(len(keys)) if missing is None else np.array(missing)
    own, shares = table.claim(number, [7], [np.array(keys, np.int64)], [at], now)
    assert all(requests == [0, 0] for _, *requests, _, _ in shares)
    left = {
        followed: list(zip(positions.tolist(), places.tolist(), strict=True))
        for followed, *_, positions, places in shares
    }
    return own[0].tolist(), left


def land(table, number, until=0.0):
    return [positions.tolist() for positions in table.land(number, until)]


def test_key_is_read_by_the_first_fetch_and_left_to_it_by_later_ones(table):
    assert claim(table, 1, 10, 20, 30, missing=[0, 2]) == ([0, 2], {})
    assert claim(table, 2, 30, 20, 10) == ([1], {1: [(0, 0), (2, 1)]})
    assert claim(table, 3, 10, 20, 40) == ([2], {1: [(0, 1)], 2: [(1, 0)]})
    assert land(table, 1) == [[2, 0]]
    assert land(table, 2) == [[1]]
    assert land(table, 3) == []
    assert [table.leave(n) for n in (1, 1, 2)] == [False, True, True]
    assert len(table) == 0


def test_equal_keys_of_different_tables_are_claimed_apart(table):
    keys, at = np.arange(3), np.arange(3)
    table.claim(1, [2**64 - 1, 4], [keys, keys + 1], [at, at], 0.0)
    own, shares = table.claim(2, [4, 5], [keys, keys], [at, at], 0.0)
    assert [each.tolist() for each in own] == [[0], [0, 1, 2]]
    ((*numbers, positions, places),) = shares
    assert (*numbers, positions.tolist(), places.tolist()) == (1, 0, 1, [1, 2], [0, 1])
    assert land(table, 1) == [[], [0, 1]]


def test_land_removes_a_fetch_without_followers(table):
    claim(table, 1, 5)
    assert len(table) == 1
    assert land(table, 1, until=9.0) == []
    assert len(table) == 0
    assert claim(table, 2, 5) == ([0], {})


def test_landed_fetch_can_be_followed_until_its_time_for_the_keys_it_keeps(table):
    claim(table, 1, 5, 6)
    claim(table, 2, 6)
    assert land(table, 1, until=2.0) == [[1]]
    assert claim(table, 3, 5, 6, now=1.0) == ([0], {1: [(1, 0)]})
    assert claim(table, 4, 6, now=2.0) == ([0], {})
    assert claim(table, 5, 6, now=1.0) == ([], {4: [(0, 0)]})
    assert [table.leave(1), table.leave(1)] == [False, True]


def test_fetch_landed_with_a_past_time_is_not_followed(table):
    claim(table, 1, 5)
    claim(table, 2, 5, 6)
    land(table, 1, until=0.0)
    assert claim(table, 3, 5, 7) == ([0, 1], {})


def test_key_left_to_another_fetch_is_not_registered_for_the_follower(table):
    claim(table, 1, 5)
    claim(table, 2, 5, 6)
    assert table.leave(1) is False
    assert land(table, 1) == []
    assert claim(table, 3, 5, 6) == ([0], {2: [(1, 0)]})


def test_of_fetches_with_few_common_keys_only_the_oldest_is_followed(table):
    claim(table, 9, *range(100))
    claim(table, 8, *range(100, 200))
    claim(table, 7, *range(200, 300))
    own, left = claim(table, 6, 50, 150, 151, *range(200, 232), *range(1000, 1100))
    assert own == [1, 2, *range(35, 135)]
    assert {n: len(pairs) for n, pairs in left.items()} == {9: 1, 7: 32}
    own, left = claim(table, 5, 150, *range(2000, 2999))  # fetch 8 is still the one found for 150
    assert (own[0], list(left)) == (1, [8])


def test_much_larger_fetch_is_not_followed(table):
    claim(table, 1, *range(8001))
    assert claim(table, 2, 5, *range(9000, 9999))[1] == {}
    # Fetch 2, which reads less, is now the one that is found for key 5.
    assert claim(table, 3, 5, *range(10_000, 11_001))[1] == {2: [(0, 0)]}
    assert claim(table, 4, 6, *range(12_000, 13_001))[1] == {1: [(0, 0)]}


def test_repeated_key_of_one_fetch_does_not_follow_itself(table):
    assert claim(table, 1, 5, 5) == ([0, 1], {})
    assert claim(table, 2, 5) == ([], {1: [(0, 0)]})


def test_unknown_and_used_numbers_are_rejected_without_effect(table):
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
def test_positions_and_arrays_that_do_not_fit_are_rejected(missing):
    table = native.InFlight()
    with pytest.raises(ValueError, match="positions of keys"):
        claim(table, 1, 5, missing=missing)
    with pytest.raises(ValueError, match="one array per table"):
        table.claim(1, [1, 2], [np.arange(3)], [np.arange(3)], 0.0)
    with pytest.raises(TypeError):
        table.claim(1, [1], [np.arange(3, dtype=np.int32)], [np.arange(3)], 0.0)
    assert claim(table, 1, 5) == ([0], {})


def as_lists(own, shares):
    """A claim's result in values that compare."""
    return (
        [positions.tolist() for positions in own],
        [(*numbers, positions.tolist(), places.tolist()) for *numbers, positions, places in shares],
    )


@pytest.mark.parametrize("seed", range(20))
def test_random_operation_sequences_give_equal_results_in_both_twins(seed):
    """Claims, some of which make the table grow, and lands and leaves in random order."""
    random = np.random.default_rng(seed)
    twins = [native.InFlight(), twin_in_flight.InFlight()]
    in_flight, followed = [], []

    def pop_random(numbers):
        return numbers.pop(random.integers(len(numbers)))

    for now in range(60):
        verb = random.integers(3)
        if verb == 0:
            tables = random.permutation(4)[: random.integers(1, 4)].tolist()
            size = random.choice([5, 50, 300, 6000 if seed < 5 else 300])
            keys = [random.permutation(2 * size)[:size] for _ in tables]
            missing = [np.flatnonzero(random.random(size) < 0.8) for _ in tables]
            claims = [each.claim(now, tables, keys, missing, float(now)) for each in twins]
            native_claim, twin_claim = (as_lists(own, shares) for own, shares in claims)
            assert native_claim == twin_claim
            in_flight.append(now)
            followed += {number for number, *_ in native_claim[1]}
        elif verb == 1 and in_flight:
            number, until = pop_random(in_flight), float(now + random.integers(-2, 9))
            assert land(twins[0], number, until) == land(twins[1], number, until)
        elif followed:
            number = pop_random(followed)
            assert twins[0].leave(number) == twins[1].leave(number)
        assert len(twins[0]) == len(twins[1])
    for number in in_flight:
        assert land(twins[0], number) == land(twins[1], number)
    for number in followed:
        assert twins[0].leave(number) == twins[1].leave(number)
    assert len(twins[0]) == len(twins[1]) == 0


def test_concurrent_claims_read_or_leave_every_key_once(table):
    """Small claims hold the GIL, large ones release it."""
    keys = [np.arange(n, n + size) for n, size in enumerate([10, 5000, 200, 9000] * 2)]
    start, claims = threading.Barrier(len(keys)), {}

    def work(number):
        start.wait(60)
        at = np.arange(len(keys[number]))
        claims[number] = table.claim(number, [1], [keys[number]], [at], 0.0)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(keys))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    followed = []
    for number, (own, shares) in claims.items():
        positions = np.concatenate([*own, *(share[3] for share in shares)])
        assert np.sort(positions).tolist() == list(range(len(keys[number])))
        followed += {share[0] for share in shares}
    kept = {number: table.land(number, 0.0) for number in claims}
    for number, (_, shares) in claims.items():
        for other, _, source_request, positions, places in shares:
            promised = keys[other][kept[other][source_request][places]]
            assert promised.tolist() == keys[number][positions].tolist()
    for number in followed:
        table.leave(number)
    assert len(table) == 0
