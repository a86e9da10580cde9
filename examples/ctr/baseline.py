"""The yardstick: a logistic regression over hashed keys, on the same split."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from examples.ctr.data import INPUTS, Samples, Split
from examples.ctr.training import auc

BUCKET_BITS = 18
BUCKETS = 1 << BUCKET_BITS
RATES = (0.02, 0.05, 0.1)
EPOCHS = 6
BATCH = 64


def hashed_regression_auc(samples: Samples, parts: Split, seed: int = 1) -> float:
    """Test AUC of the rate and epoch that are best on the valid part.

    Each (column, value) pair, the numbers included, is one of ``BUCKETS`` weights; trained by AdaGrad.
    """
    buckets = _buckets(samples)
    best_valid = best_test = 0.0
    for rate in RATES:
        weights, squares = np.zeros(BUCKETS), np.full(BUCKETS, 1e-8)
        shuffle = np.random.default_rng(seed)
        for _ in range(EPOCHS):
            order = shuffle.permutation(parts.train)
            for start in range(0, len(order), BATCH):
                rows = order[start : start + BATCH]
                _step(weights, squares, buckets[rows], samples.clicked[rows], rate)
            valid = _auc(weights, buckets, samples, parts.valid)
            if valid > best_valid:
                best_valid, best_test = valid, _auc(weights, buckets, samples, parts.test)
    return best_test


def _buckets(samples: Samples) -> NDArray[np.int64]:
    """``(n, columns)``: each value's bucket, by a multiplicative hash of column and value."""
    columns = list(samples.keys.values())
    columns += [samples.inputs[name][:, 0].astype(np.int64) for name in INPUTS]
    # Differently salted per column; products are meant to wrap around.
    salts = (np.arange(1, len(columns) + 1, dtype=np.uint64)[:, None]) * np.uint64(
        0x9E3779B97F4A7C15
    )
    mixed = (np.stack(columns).view(np.uint64) + salts) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(64 - BUCKET_BITS)).T.astype(np.int64)


def _step(
    weights: NDArray[np.float64],
    squares: NDArray[np.float64],
    buckets: NDArray[np.int64],
    clicked: NDArray[np.float32],
    rate: float,
) -> None:
    error = 1 / (1 + np.exp(-weights[buckets].sum(1))) - clicked
    touched, place = np.unique(buckets, return_inverse=True)
    gradient = np.bincount(place.ravel(), np.repeat(error, buckets.shape[1]))
    squares[touched] += gradient**2
    weights[touched] -= rate * gradient / np.sqrt(squares[touched])


def _auc(
    weights: NDArray[np.float64],
    buckets: NDArray[np.int64],
    samples: Samples,
    rows: NDArray[np.int64],
) -> float:
    return auc(samples.clicked[rows], weights[buckets[rows]].sum(1))
