"""Samples of a trace: all accesses to some keys, in order and in bounded memory."""

from io import BytesIO

import numpy as np
import pytest

from hps.lookup.key_sampling import KeySampler, merge_traces, pack_samples, unpack_samples

RANDOM = np.random.default_rng(3)


def test_small_trace_is_kept_as_a_whole():
    sampler = KeySampler()
    keys = np.array([7, -7, 7, 2**62, 7])
    sampler.add(keys[:2], np.array([0, 0]))
    sampler.add(keys[2:], np.array([1, 1, 2]))
    sample = sampler.sample()
    assert sample.keys.tolist() == keys.tolist()
    assert sample.requests.tolist() == [0, 0, 1, 1, 2]
    assert sample.positions.tolist() == [0, 1, 2, 3, 4]
    assert (sample.accesses, sample.rate) == (5, 1.0)


def test_large_trace_keeps_all_accesses_to_a_share_of_the_keys():
    keys = RANDOM.integers(0, 40_000, 300_000)
    sampler = KeySampler(max_keys=2_000)
    for part in np.array_split(keys, 7):
        sampler.add(part, np.zeros(len(part), np.int64))
    sample = sampler.sample()
    kept = np.unique(sample.keys)
    assert sample.accesses == len(keys)
    assert 1_000 < len(kept) <= 2_000
    assert len(kept) / sample.rate == pytest.approx(40_000, rel=0.1)
    assert (keys[sample.positions] == sample.keys).all()
    expected = keys[np.isin(keys, kept)]
    assert without_repeats(sample.keys) == without_repeats(expected)


def without_repeats(keys):
    return keys[np.append(True, keys[1:] != keys[:-1])].tolist()


def test_accesses_are_bounded_too():
    """Also by a key that gets most accesses, whose repetitions tell nothing."""
    keys = np.where(RANDOM.random(200_000) < 0.9, 1, RANDOM.integers(0, 50_000, 200_000))
    sampler = KeySampler(max_accesses=30_000)
    sampler.add(keys, np.zeros(len(keys), np.int64))
    sample = sampler.sample()
    assert len(sample.keys) <= 60_000
    assert sample.accesses == 200_000


def test_traces_of_processes_are_merged_in_the_order_of_their_requests():
    def packed(keys, max_keys=1 << 18):
        sampler = KeySampler(max_keys)
        sampler.add(keys, np.arange(len(keys)) // 2)
        return pack_samples({"t": sampler.sample()}, len(keys) // 2, 2.0)

    merged = merge_traces([packed(np.arange(8)), packed(np.arange(100, 104)), packed(np.arange(0))])
    samples, requests, batch = unpack_samples(np.load(BytesIO(merged)))
    assert (requests, batch, samples["t"].accesses) == (6, 2.0, 12)
    assert samples["t"].keys.tolist() == [0, 1, 100, 101, 2, 3, 4, 5, 102, 103, 6, 7]
    assert samples["t"].requests.tolist() == np.repeat(np.arange(6), 2).tolist()
    assert (np.diff(samples["t"].positions) >= 0).all()
    keys = RANDOM.integers(0, 20_000, 20_000)
    merged = merge_traces([packed(keys, 2_000), packed(keys)])
    sample = unpack_samples(np.load(BytesIO(merged)))[0]["t"]
    assert sample.rate < 0.2
    assert len(np.unique(sample.keys)) / sample.rate == pytest.approx(len(np.unique(keys)), rel=0.1)
