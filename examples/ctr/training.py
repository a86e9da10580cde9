"""Trains the model so that what is served is exactly what was trained.

Keys seen fewer than ``min_count`` times get no row: in training as in serving they share the table's
default row, which is learned. So a key the server has never heard of is no special case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpy.typing import NDArray

from examples.ctr.data import FEATURES, Samples, Split
from examples.ctr.network import Params, encode, init, logits, scaled, scaling


@dataclass(frozen=True, slots=True)
class Options:
    """Found by 4-fold cross-validation on the 80 % of the rows that are not the test split."""

    seed: int = 1
    epochs: int = 8
    patience: int = 3
    """Epochs without a better valid AUC after which training stops; the best epoch is kept."""
    batch: int = 512
    min_count: int = 2
    dim: int = 16
    hidden: int = 256
    network_rate: float = 1.8e-3
    rows_rate: float = 3e-3
    row_scale: float = 0.03
    own_penalty: float = 27.0
    """Pulls what is a key's own towards 0, and so its row towards what it shares with others."""
    row_penalty: float = 1.3e-3
    weight_decay: float = 4e-3
    dropout: float = 0.5
    key_dropout: float = 0.08
    """Share of keys that training takes for unknown, so that the default rows learn their part."""


DEFAULTS = Options()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The keys with a row, of all features one after the other; each feature's first place is its
    default row's.

    places (n,): ``keys``, ``counts`` in the training part, ``feature`` numbers; ``first (features,)``.
    """

    keys: NDArray[np.int64]
    counts: NDArray[np.int64]
    feature: NDArray[np.int64]
    first: NDArray[np.int64]

    @staticmethod
    def of(samples: Samples, min_count: int) -> Vocabulary:
        """The hottest keys of a feature come first."""
        keys, counts = [], []
        for name in FEATURES:
            found, times = np.unique(samples.keys[name], return_counts=True)
            kept = np.argsort(-times, kind="stable")[: int((times >= min_count).sum())]
            keys.append(np.concatenate([[0], found[kept]]))
            counts.append(np.concatenate([[min_count], times[kept]]))
        sizes = np.array([len(k) for k in keys])
        return Vocabulary(
            np.concatenate(keys),
            np.concatenate(counts),
            np.repeat(np.arange(len(sizes)), sizes),
            np.concatenate([[0], np.cumsum(sizes)[:-1]]),
        )

    def of_feature(self, number: int) -> slice:
        """The places of a feature's keys, without its default row's."""
        return slice(int(self.first[number]) + 1, int(np.searchsorted(self.feature, number + 1)))

    def places(self, samples: Samples) -> NDArray[np.int32]:
        """``(n, features)``: where each key's row is, the default row's place for unknown keys."""
        columns = []
        for number, name in enumerate(FEATURES):
            where = self.of_feature(number)
            order = np.argsort(self.keys[where])
            known = self.keys[where][order]
            low = np.searchsorted(known, samples.keys[name])
            hit = low < np.searchsorted(known, samples.keys[name], side="right")
            column = np.full(len(samples), self.first[number])
            column[hit] = where.start + order[low[hit]]
            columns.append(column)
        return np.stack(columns, axis=1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of training: the network, a row per position of the vocabulary, and its figures."""

    options: Options
    vocabulary: Vocabulary
    network: dict[str, NDArray[np.float32]]
    rows: NDArray[np.float32]
    epoch: int
    valid_auc: float

    def score(self, samples: Samples) -> dict[str, NDArray[np.float32]]:
        """The trainer's own scores: ``click`` (probability) and ``logit``, each ``(n,)``."""
        rows = jnp.asarray(self.rows)[self.vocabulary.places(samples)]
        x = scaled(self.network, encode(samples.inputs))
        values = np.asarray(logits(self.network, rows, x))
        return {"click": np.asarray(jax.nn.sigmoid(values)), "logit": values}


def auc(clicked: NDArray[Any], scores: NDArray[Any]) -> float:
    """Area under the ROC curve; equal scores count half."""
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    positive = float(clicked.sum())
    negative = len(clicked) - positive
    below = float(rank[clicked == 1].sum()) - positive * (positive + 1) / 2
    return below / (positive * negative)


def train(
    samples: Samples,
    parts: Split,
    options: Options = DEFAULTS,
    report: Callable[[str], None] = lambda _line: None,
) -> Trained:
    """Train on ``parts.train``, stop by ``parts.valid``; ``report`` gets a line an epoch."""
    learn, check = samples.take(parts.train), samples.take(parts.valid)
    vocabulary = Vocabulary.of(learn, options.min_count)
    model = _Model(options, vocabulary, learn)
    params, state = model.start()
    shuffle = np.random.default_rng(options.seed)
    checked = jnp.asarray(vocabulary.places(check)), scaled(model.scaling, encode(check.inputs))
    best, best_auc, best_epoch = params, 0.0, 0
    for epoch in range(1, options.epochs + 1):
        params, state = model.epoch(params, state, shuffle.permutation(len(learn)), epoch)
        valid_auc = auc(check.clicked, np.asarray(model.score(params, *checked)))
        report(f"epoch {epoch}: valid AUC {valid_auc:.4f}")
        if valid_auc > best_auc:
            best, best_auc, best_epoch = params, valid_auc, epoch
        elif epoch - best_epoch >= options.patience:
            break
    network = {k: np.asarray(v) for k, v in (best["network"] | model.scaling).items()}
    return Trained(options, vocabulary, network, model.rows(best), best_epoch, best_auc)


class _Model:
    """Parameters and steps. A key's row is ``default + shared + popularity * slope + own``: what an
    unknown key gets, what known ones have more, and what is the key's own, pulled to 0."""

    def __init__(self, options: Options, vocabulary: Vocabulary, learn: Samples) -> None:
        self._options = options
        self._steps = len(learn) // options.batch
        self._first = jnp.asarray(vocabulary.first, jnp.int32)
        self._feature = jnp.asarray(vocabulary.feature, jnp.int32)
        self._popularity = jnp.log(jnp.asarray(vocabulary.counts) / options.min_count) / 3
        self._samples = len(learn)
        encoded = encode(learn.inputs)
        self.scaling = scaling(encoded)
        self._learn = (
            jnp.asarray(vocabulary.places(learn)),
            scaled(self.scaling, encoded),
            jnp.asarray(learn.clicked),
        )
        self._optimizer = _optimizer(options, self._steps)
        self._run = jax.jit(self._run_epoch)
        self.score = jax.jit(self._score)

    def start(self) -> tuple[Params, Any]:
        options, dim = self._options, self._options.dim
        keys = jax.random.split(jax.random.PRNGKey(options.seed), 3)
        own = jax.random.normal(keys[0], (len(self._feature), dim)) * options.row_scale
        per_feature = (len(FEATURES), dim)
        params = {
            "own": own.at[:, 0].set(0.0),
            "default": jax.random.normal(keys[1], per_feature) * options.row_scale,
            "shared": jnp.zeros(per_feature),
            "slope": jnp.zeros(per_feature),
            "network": init(options.dim, options.hidden, np.asarray(self._learn[2]), keys[2]),
        }
        return params, self._optimizer.init(params)

    def rows(self, params: Params) -> NDArray[np.float32]:
        """The row of every place, as it is served."""
        every = jnp.arange(len(self._feature), dtype=jnp.int32)
        return np.asarray(self._look_up(params, every, self._feature))

    def epoch(
        self, params: Params, state: Any, order: NDArray[np.int64], number: int
    ) -> tuple[Params, Any]:
        batches = order[: self._steps * self._options.batch].reshape(self._steps, -1)
        key = jax.random.fold_in(jax.random.PRNGKey(self._options.seed), number)
        keys = jax.random.split(key, self._steps)
        result: tuple[Params, Any] = self._run(params, state, jnp.asarray(batches), keys)
        return result

    def _run_epoch(
        self, params: Params, state: Any, batches: Array, keys: Array
    ) -> tuple[Params, Any]:
        def step(carry: tuple[Params, Any], given: tuple[Array, Array]) -> tuple[Any, None]:
            params, state = carry
            gradient = jax.grad(self._loss)(params, *given)
            updates, state = self._optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        carry, _ = jax.lax.scan(step, (params, state), (batches, keys))
        return carry

    def _loss(self, params: Params, batch: Array, key: Array) -> Array:
        options = self._options
        places, x, clicked = (part[batch] for part in self._learn)
        forget, drop = jax.random.split(key)
        forgotten = jax.random.bernoulli(forget, options.key_dropout, places.shape)
        rows = self._look_up(params, jnp.where(forgotten, self._first, places))
        values = logits(params["network"], rows, x, options.dropout, drop)
        own = (params["own"] ** 2).sum() / self._samples
        loss: Array = optax.sigmoid_binary_cross_entropy(values, clicked).mean()
        loss += options.own_penalty * own
        loss += options.row_penalty * (rows**2).sum((1, 2)).mean()
        return loss

    def _look_up(self, params: Params, places: Array, feature: Array | None = None) -> Array:
        """``places (n, features)``, or any shape with each place's ``feature`` → ``(…, dim)``."""
        feature = jnp.arange(len(FEATURES)) if feature is None else feature
        more = params["shared"][feature] + (
            self._popularity[places][..., None] * params["slope"][feature]
        )
        known = (places != self._first[feature])[..., None]
        rows: Array = params["default"][feature] + known * (more + params["own"][places])
        return rows

    def _score(self, params: Params, places: Array, x: Array) -> Array:
        return logits(params["network"], self._look_up(params, places), x)


def _optimizer(options: Options, steps: int) -> optax.GradientTransformation:
    """Adam with a rate of its own for the keys' rows, weight decay on the hidden layer, cosine decay."""

    def decayed(params: Params) -> Any:
        names = ("hidden", "hidden_bias", "out")
        return {
            name: {part: part in names for part in value} if name == "network" else False
            for name, value in params.items()
        }

    return optax.chain(
        optax.scale_by_adam(),
        optax.add_decayed_weights(options.weight_decay, decayed),
        optax.partition(
            {
                "own": optax.scale_by_learning_rate(options.rows_rate),
                "other": optax.scale_by_learning_rate(options.network_rate),
            },
            lambda params: {
                name: "own" if name == "own" else jax.tree.map(lambda _: "other", value)
                for name, value in params.items()
            },
        ),
        optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, options.epochs * steps)),
    )
