"""Random operations on `hps.table.Table` give the answers of a dictionary, on every backend and policy."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hps.table import Policy
from tests.support.tables import BACKENDS, BUCKET, DIM, POLICIES, Clock, everything, make

MOST, LOW = 2**64 - 1, 2**32 - 1
KEY = st.sampled_from([*range(-20, 20), -(2**63), 2**63 - 1, 2**32, -(2**32)])
SCORE = st.sampled_from([0, 1, 5, 7, LOW - 3, LOW, MOST - 6, MOST]) | st.integers(0, 100)
ENTRY = st.tuples(KEY, st.integers(-50, 50), SCORE, st.booleans())
BATCH = st.lists(ENTRY, max_size=12)


class TableMachine(RuleBasedStateMachine):
    """All operations with batches in which keys repeat. The table holds at least as many rows as keys
    occur, so that nothing is evicted but by `evictions` on a table of one bucket."""

    def __init__(self, backend, policy):
        super().__init__()
        self.backend, self.policy, self.clock = backend, policy, Clock()
        self.model = {}
        self.folder = TemporaryDirectory()
        self.saves = 0

    @initialize(growing=st.booleans(), dtype=st.sampled_from(["f4", "f2", "i2"]))
    def open(self, growing, dtype):
        self.growing, self.dtype = growing, dtype
        self.table = self.new()

    def new(self):
        sizes = {"max_load_factor": 0.02, "max_capacity": 8 * BUCKET} if self.growing else {}
        return make(self.backend, policy=self.policy, clock=self.clock, dtype=self.dtype, **sizes)

    def teardown(self):
        self.folder.cleanup()

    # -- the model ---------------------------------------------------------------------------------

    def arrays(self, batch):
        """Return keys, rows, flags, and the scores as the policy takes them."""
        self.clock.now += 1 << 20
        keys = np.array([key for key, *_ in batch], np.int64)
        rows = np.array([[v] * DIM for _, v, *_ in batch], self.dtype).reshape(-1, DIM)
        scores = np.array([score for _, _, score, _ in batch], np.uint64)
        flags = np.array([flag for *_, flag in batch], bool)
        return keys, rows, flags, scores if self.table.policy.takes_scores else None

    def scored(self, former, given):
        """Return the score after a write: HierarchicalKV's definitions."""
        now, epoch = self.clock.now, self.table.epoch << 32
        match self.policy:
            case Policy.LRU:
                return now
            case Policy.LFU:
                return min((former or 0) + given, MOST)
            case Policy.EPOCH_LRU:
                return epoch | (now >> 20) & LOW
            case Policy.EPOCH_LFU:
                return epoch | min(((former or 0) & LOW) + (given & LOW), LOW)
            case Policy.CUSTOMIZED:
                return given

    def put(self, key, row, given):
        former = self.model.get(key)
        self.model[key] = (row, self.scored(former and former[1], given))

    # -- operations --------------------------------------------------------------------------------

    @rule(batch=BATCH)
    def insert_or_assign(self, batch):
        keys, rows, _, scores = self.arrays(batch)
        found = self.table.insert_or_assign(keys, rows, scores)
        for (key, value, given, _), was in zip(batch, found.tolist(), strict=True):
            assert was == (key in self.model)
            self.put(key, [value] * DIM, given)

    @rule(batch=BATCH)
    def insert_and_evict(self, batch):
        keys, rows, _, scores = self.arrays(batch)
        assert len(self.table.insert_and_evict(keys, rows, scores).keys) == 0
        for key, value, given, _ in batch:
            self.put(key, [value] * DIM, given)

    @rule(batch=BATCH)
    def insert_exported(self, batch):
        keys, rows, _, _ = self.arrays(batch)
        scores = np.array([score for _, _, score, _ in batch], np.uint64)
        self.table.insert_or_assign(keys, rows, scores, ignore_evict_strategy=True)
        for key, value, given, _ in batch:
            self.model[key] = ([value] * DIM, given)

    @rule(batch=BATCH)
    def find_or_insert(self, batch):
        keys, rows, _, scores = self.arrays(batch)
        result = self.table.find_or_insert(keys, rows, scores)
        for at, (key, value, given, _) in enumerate(batch):
            assert result.found[at] == (key in self.model)
            self.put(key, self.model.get(key, ([value] * DIM,))[0], given)
            assert result.rows[at].tolist() == self.model[key][0]

    @rule(batch=BATCH, what=st.sampled_from(["both", "scores", "values"]))
    def assign(self, batch, what):
        keys, rows, _, scores = self.arrays(batch)
        if what == "both":
            found = self.table.assign(keys, rows, scores)
        elif what == "scores":
            found = self.table.assign_scores(keys, scores)
        else:
            found = self.table.assign_values(keys, rows)
        for (key, value, given, _), was in zip(batch, found.tolist(), strict=True):
            assert was == (key in self.model)
            if was:
                row, score = self.model[key]
                self.put(key, row if what == "scores" else [value] * DIM, given)
                if what == "values":
                    self.model[key] = ([value] * DIM, score)

    @rule(batch=BATCH)
    def accum_or_assign(self, batch):
        keys, rows, flags, scores = self.arrays(batch)
        found = self.table.accum_or_assign(keys, rows, flags, scores)
        for (key, value, given, flag), was in zip(batch, found.tolist(), strict=True):
            assert was == (key in self.model)
            if was and flag:
                total = np.array(self.model[key][0], self.dtype) + np.array(value, self.dtype)
                self.put(key, total.tolist(), given)
            elif not was and not flag:
                self.put(key, [value] * DIM, given)

    @rule(batch=BATCH)
    def erase(self, batch):
        keys, *_ = self.arrays(batch)
        for key, was in zip(keys.tolist(), self.table.erase(keys).tolist(), strict=True):
            assert was == (self.model.pop(key, None) is not None)

    @rule(bound=SCORE, odd=st.booleans())
    def erase_if(self, bound, odd):
        chosen = [k for k, (_, s) in self.model.items() if s < bound and k % 2 == odd]
        erased = self.table.erase_if(lambda k, s: (s < np.uint64(bound)) & (k % 2 == odd))
        assert erased == len(chosen)
        for key in chosen:
            del self.model[key]

    @rule(bound=SCORE)
    def export_batch_if(self, bound):
        got = self.table.export_batch_if(lambda k, s: s >= np.uint64(bound), self.table.capacity)
        expected = {k: each for k, each in self.model.items() if each[1] >= bound}
        rows = zip(got.rows.tolist(), got.scores.tolist(), strict=True)
        assert dict(zip(got.keys.tolist(), rows, strict=True)) == expected
        assert self.table.size_if(lambda k, s: s >= np.uint64(bound)) == len(expected)

    @rule(batch=BATCH)
    def find(self, batch):
        keys, *_ = self.arrays(batch)
        out = np.full((len(keys), DIM), 9, self.dtype)
        result = self.table.find(keys, out=out, with_scores=True)
        absent = ([9] * DIM, 0)
        expected = [self.model.get(key, absent) for key in keys.tolist()]
        assert result.found.tolist() == [key in self.model for key in keys.tolist()]
        assert result.rows.tolist() == [row for row, _ in expected]
        assert result.scores.tolist() == [score for _, score in expected]
        assert self.table.contains(keys).tolist() == result.found.tolist()
        numbers = self.table.find_rows(keys)
        assert (numbers >= 0).tolist() == result.found.tolist()
        there = numbers >= 0
        if self.backend != "cuda, half":
            assert self.table.rows[numbers[there]].tolist() == result.rows[there].tolist()

    @rule()
    def clear(self):
        self.table.clear()
        self.model.clear()

    @rule()
    def save_and_load(self):
        self.saves += 1
        folder = Path(self.folder.name) / str(self.saves)
        assert self.table.save(folder) == len(self.model)
        epoch, self.table = self.table.epoch, self.new()
        assert self.table.load(folder) == len(self.model)
        self.table.epoch = epoch

    @rule(epoch=st.integers(0, 3) | st.just(LOW))
    def advance(self, epoch):
        self.table.epoch = epoch

    @precondition(lambda self: self.growing)
    @rule(factor=st.sampled_from([1, 2, 4, 8]))
    def reserve(self, factor):
        self.table.reserve(factor * BUCKET)
        assert self.table.capacity >= factor * BUCKET

    @precondition(lambda self: not self.growing)
    @rule(highest=st.integers(0, 60), n=st.integers(1, BUCKET + 20))
    def evictions(self, highest, n):
        """New keys, whose scores differ, on top of the present rows: the highest scores stay."""
        keys = np.arange(1000, 1000 + n)
        rows = (keys[:, None] % 50 + np.zeros(DIM)).astype(self.dtype)
        taken = {score for _, score in self.model.values()}
        free = [s for s in range(highest, highest + 400) if s not in taken][:n]
        scores = np.random.default_rng(n).permutation(np.array(free, np.uint64))
        evicted = self.table.insert_and_evict(keys, rows, scores, ignore_evict_strategy=True)
        for key, row, score in zip(keys.tolist(), rows.tolist(), scores.tolist(), strict=True):
            self.model[key] = (row, score)
        kept = everything(self.table)
        scores = {key: score for key, (_, score) in self.model.items()}
        gone = self.model.keys() - kept.keys()
        assert sorted(gone) == sorted(evicted.keys.tolist())
        for key, row, score in zip(*(array.tolist() for array in evicted), strict=True):
            assert self.model[key] == (row, score)
        if gone:
            assert len(kept) == BUCKET
            assert max(scores[k] for k in gone) <= min(scores[k] for k in kept)
        self.table.erase_if(lambda k, s: (k >= 1000) & (k < 1000 + n))
        self.model = {k: each for k, each in kept.items() if not 1000 <= k < 1000 + n}

    @invariant()
    def contents(self):
        if hasattr(self, "table"):
            assert everything(self.table) == self.model


@pytest.mark.parametrize("backend", BACKENDS)
def test_millions_of_operations_give_the_answers_of_a_dictionary(backend):
    """10^7 on a device. Half of a batch's positions repeat a few keys; nothing is evicted."""
    sizes = {"cuda": (100, 100_000), "cpu": (20, 20_000), "twin": (6, 2000)}
    batches, n = sizes[backend.partition(",")[0]]
    table, rng = make(backend, 4 * n, policy="lfu"), np.random.default_rng(11)
    model: dict[int, list[float]] = {}  # the first number of the row, and the score
    for turn in range(batches):
        keys = rng.integers(0, n, n)
        keys[: n // 2] = rng.choice(keys, 1000)[rng.integers(0, 1000, n // 2)]
        values, given = rng.integers(-8, 8, n), rng.integers(0, 5, n)
        rows = np.repeat(values[:, None], DIM, 1).astype(np.float32)
        flags = rng.random(n) < 0.5
        operation = ("insert", "find_or_insert", "accumulate", "assign", "erase")[turn % 5]
        if operation == "insert":
            found = table.insert_or_assign(keys, rows, given)
        elif operation == "find_or_insert":
            found = table.find_or_insert(keys, rows, given)
            found, first = found.found, found.rows[:, 0].tolist()
        elif operation == "accumulate":
            found = table.accum_or_assign(keys, rows, flags, given)
        elif operation == "assign":
            found = table.assign(keys, rows, given)
        else:
            found = table.erase(keys)
        was = found.tolist()
        for at, (key, value, score, flag) in enumerate(
            zip(keys.tolist(), values.tolist(), given.tolist(), flags.tolist(), strict=True)
        ):
            entry = model.get(key)
            assert was[at] == (entry is not None)
            if operation == "erase":
                model.pop(key, None)
            elif entry is None:
                if operation != "assign" and not (operation == "accumulate" and flag):
                    model[key] = [value, score]
            elif operation == "accumulate":
                if flag:
                    entry[0] += value
                    entry[1] += score
            else:
                if operation != "find_or_insert":
                    entry[0] = value
                entry[1] += score
            if operation == "find_or_insert":
                assert first[at] == model[key][0]
    contents = table.export_batch(table.capacity)
    assert (contents.rows == contents.rows[:, :1]).all()
    entries = zip(contents.rows[:, 0].tolist(), contents.scores.tolist(), strict=True)
    assert dict(zip(contents.keys.tolist(), map(list, entries), strict=True)) == model
    assert len(contents.keys) == len(model) == table.size


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_behaves_like_a_dictionary(backend, policy):
    run_state_machine_as_test(
        lambda: TableMachine(backend, policy),
        settings=settings(max_examples=25, stateful_step_count=30),
    )
