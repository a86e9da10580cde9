"""Learn embeddings of a stream of keys in a table that holds only some of them.

    python -m examples.table.factorize [--capacity 16384] [--batches 300]

Users rate items; popular ones far more often than others. Both have a row in a table, found or inserted
batch by batch, and trained by stochastic gradient descent. The tables are too small for all keys: under the
policy ``epoch_lfu`` they evict keys of older epochs first, and then those with the fewest uses. At the end
the items' table is saved and loaded again.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hps.table import Table

DIM, BATCH, KEYS, RATE = 8, 2048, 200_000, 0.5
BATCHES_AN_EPOCH = 50

Ratings = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]


def ratings(batches: int, seed: int = 1) -> Iterator[Ratings]:
    """Yield batches of users, items and ratings; a rating depends on hidden vectors of both."""
    random = np.random.default_rng(seed)
    hidden = random.normal(0, 0.7, (2, KEYS, 4)).astype(np.float32)
    for _ in range(batches):
        users, items = random.zipf(1.2, (2, BATCH)) % KEYS
        yield users, items, (hidden[0][users] * hidden[1][items]).sum(1)


def rows_for(table: Table, keys: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the rows of ``keys``; new keys get random ones. Counts a use of each key."""
    start = np.random.default_rng(len(table)).normal(0, 0.3, (len(keys), DIM)).astype(np.float32)
    return table.find_or_insert(keys, start).rows


def times(keys: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return how often each key is in the batch (n, 1): the table adds all positions of a key."""
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    return counts[inverse].astype(np.float32)[:, None]


def learn(users: Table, items: Table, batch: Ratings) -> float:
    """Train on one batch; return the mean squared error before."""
    user_keys, item_keys, rating = batch
    of_users, of_items = rows_for(users, user_keys), rows_for(items, item_keys)
    error = (of_users * of_items).sum(1) - rating
    resident = np.ones(BATCH, bool)
    used = np.zeros(BATCH, np.uint64)  # rows_for has counted the use
    step = (-RATE * np.clip(error, -1, 1))[:, None]
    users.accum_or_assign(user_keys, step * of_items / times(user_keys), resident, used)
    items.accum_or_assign(item_keys, step * of_users / times(item_keys), resident, used)
    return float((error**2).mean())


def main(capacity: int, batches: int) -> list[float]:
    """Train, save and load; return the error of each epoch."""
    users, items = (Table(DIM, init_capacity=capacity, policy="epoch_lfu") for _ in range(2))
    errors: list[float] = []
    for number, batch in enumerate(ratings(batches)):
        users.epoch = items.epoch = number // BATCHES_AN_EPOCH
        if number % BATCHES_AN_EPOCH == 0:
            errors.append(0.0)
        errors[-1] += learn(users, items, batch) / BATCHES_AN_EPOCH
        if (number + 1) % BATCHES_AN_EPOCH == 0:
            print(f"epoch {items.epoch}: error {errors[-1]:.3f}, {len(items)} items")
    with tempfile.TemporaryDirectory() as folder:
        items.save(Path(folder) / "items")
        copy = Table(DIM, init_capacity=capacity, policy="epoch_lfu")
        print(f"{copy.load(Path(folder) / 'items')} items saved and loaded")
    return errors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacity", type=int, default=16384)
    parser.add_argument("--batches", type=int, default=300)
    main(**vars(parser.parse_args()))
