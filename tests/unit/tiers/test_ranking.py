"""Merged rankings of caches."""

import numpy as np

from hps.tiers.ranking import MergedRanking
from hps.types import EmbeddingTable

TABLE = EmbeddingTable.make("t", 4)


class Ranked:
    def __init__(self, *keys):
        self.keys, self.asked = np.array(keys, np.int64), 0

    def top_k(self, _table, n):
        self.asked += 1
        return self.keys[:n], (255 - np.arange(len(self.keys))).astype(np.uint8)[:n]

    def capacity(self, _table):
        return len(self.keys)


def test_keys_of_the_first_cache_rank_first_and_keep_their_scores():
    keys, scores = MergedRanking([Ranked(5, 3, 9), Ranked(3, 7, 5, 1)]).top_k(TABLE, 5)
    assert keys.tolist() == [5, 3, 9, 7, 1]
    assert scores.tolist() == [255, 254, 253, 254, 252]


def test_keys_that_are_reported_twice_count_once():
    keys, scores = MergedRanking([Ranked(5, 3, 5, 9), Ranked(2)]).top_k(TABLE, 4)
    assert keys.tolist() == [5, 3, 9, 2]
    assert scores.tolist() == [255, 254, 252, 255]


def test_later_caches_are_asked_only_for_keys_that_are_missing():
    first, second = Ranked(5, 3, 9), Ranked(1)
    assert MergedRanking([first, second]).top_k(TABLE, 2)[0].tolist() == [5, 3]
    assert (first.asked, second.asked) == (1, 0)
    assert MergedRanking([first, second]).top_k(TABLE, 0)[0].tolist() == []
