"""Continued training: rows follow the impressions that come, the network and the default rows stay.

A key gets a row once it was seen ``min_count`` times, as in ``training.py``; until then it shares the default
row of its table. It begins with the mean of the base's rarest rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpy.typing import NDArray

from examples.ctr.data import FEATURES, Samples
from examples.ctr.network import encode, logits, scaled
from examples.ctr.training import Trained

RATE, FIRST_SQUARE = 0.01, 1e-4


class OnlineRows:
    """The rows of ``base`` and of keys that come, trained by AdaGrad, a rate per row."""

    def __init__(self, base: Trained) -> None:
        vocabulary = base.vocabulary
        self._min_count = base.options.min_count
        self._network = {name: jnp.asarray(part) for name, part in base.network.items()}
        self._gradient = jax.jit(jax.grad(self._loss))
        # One place per row; each feature's default row among them.
        self._keys, self._feature = vocabulary.keys.copy(), vocabulary.feature.copy()
        self._counts, self._rows = vocabulary.counts.copy(), base.rows.copy()
        self._squares = np.full(len(self._rows), FIRST_SQUARE)
        self._default = vocabulary.first
        self._begin = np.stack([_rarest(base, number) for number in range(len(FEATURES))])
        self._places: list[dict[int, int]] = []
        for number in range(len(FEATURES)):
            where = vocabulary.of_feature(number)
            keys = vocabulary.keys[where].tolist()
            self._places.append(dict(zip(keys, range(where.start, where.stop), strict=True)))

    def learn(self, batch: Samples) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """One step; the keys and rows that it changed, by table."""
        for number, name in enumerate(FEATURES):
            self._count(number, *np.unique(batch.keys[name], return_counts=True))
        places = self._look_up(batch)
        gradient = self._gradient(self._rows[places], self._scaled(batch), batch.clicked)
        touched, back = np.unique(places, return_inverse=True)
        total = np.zeros((len(touched), self._rows.shape[1]), np.float32)
        np.add.at(total, back.ravel(), np.asarray(gradient).reshape(-1, total.shape[1]))
        own = ~np.isin(touched, self._default)
        self._move(touched[own], total[own])
        changed = {}
        for number, name in enumerate(FEATURES):
            mine = touched[own & (self._feature[touched] == number)]
            changed[name] = self._keys[mine], self._rows[mine]
        return changed

    def score(self, samples: Samples) -> NDArray[np.float32]:
        """Logits (n,)."""
        rows = jnp.asarray(self._rows[self._look_up(samples)])
        return np.asarray(logits(self._network, rows, self._scaled(samples)))

    def _count(self, number: int, keys: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        places = self._places[number]
        new = np.array([key not in places for key in keys.tolist()])
        size, added = len(self._keys), int(new.sum())
        places.update(zip(keys[new].tolist(), range(size, size + added), strict=True))
        self._keys = np.concatenate([self._keys, keys[new]])
        self._feature = np.concatenate([self._feature, np.full(added, number)])
        self._counts = np.concatenate([self._counts, np.zeros(added, np.int64)])
        self._rows = np.concatenate([self._rows, np.tile(self._begin[number], (added, 1))])
        self._squares = np.concatenate([self._squares, np.full(added, FIRST_SQUARE)])
        self._counts[[places[key] for key in keys.tolist()]] += times

    def _look_up(self, samples: Samples) -> NDArray[np.int64]:
        """``(n, features)``: the place of each key's row, the default's for those that have none yet."""
        columns = []
        for number, name in enumerate(FEATURES):
            default = int(self._default[number])
            known = self._places[number]
            found = np.array([known.get(key, default) for key in samples.keys[name].tolist()])
            columns.append(np.where(self._counts[found] >= self._min_count, found, default))
        return np.stack(columns, axis=1)

    def _scaled(self, samples: Samples) -> Array:
        return scaled(self._network, encode(samples.inputs))

    def _loss(self, rows: Array, x: Array, clicked: NDArray[np.float32]) -> Array:
        values = logits(self._network, rows, x)
        loss: Array = optax.sigmoid_binary_cross_entropy(values, clicked).sum()
        return loss

    def _move(self, places: NDArray[np.int64], gradient: NDArray[np.float32]) -> None:
        self._squares[places] += (gradient**2).mean(axis=1)
        self._rows[places] -= RATE * gradient / np.sqrt(self._squares[places])[:, None]


def _rarest(base: Trained, number: int) -> NDArray[np.float32]:
    """Initial row of a new key of a feature: the mean of its rarest keys' rows, else the default row."""
    where = base.vocabulary.of_feature(number)
    counts, rows = base.vocabulary.counts[where], base.rows[where]
    if not len(rows):
        return base.rows[base.vocabulary.first[number]]
    mean: NDArray[np.float32] = rows[counts == counts.min()].mean(axis=0)
    return mean
