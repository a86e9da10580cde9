"""Traffic split: the version of each request that names none, by a model's traffic rule.

Sticky choices use weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted Distributed Hash
Tables", SPAA 2005): each version has a score ``-ln(u) / weight`` with ``u`` in (0, 1) from a hash of model,
version and key, and the lowest score wins. It needs no state, so that all processes choose alike, also after
a restart. A version whose weight grows gains keys and loses none."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable
from hashlib import blake2b
from itertools import accumulate
from random import random
from typing import Any

import numpy as np

from hps.config.traffic_settings import RequestKey, TrafficRule

ValueOf = Callable[[RequestKey], str | None]
"""Returns the request's value of a key as text; None if it has none."""
_CURRENT = ""


class TrafficSplit:
    """Chooses a version for each request to one model. Immutable, so thread-safe."""

    __slots__ = ("_bounds", "_hashes", "_matches", "_names", "keys", "needs_body", "sticky")

    def __init__(self, model: str, rule: TrafficRule) -> None:
        """``rule`` has weights or matches."""
        self._matches = [(RequestKey.parse(m.by), m.value, m.version) for m in rule.matches]
        self.sticky = None if rule.sticky is None else RequestKey.parse(rule.sticky)
        rest = max(0.0, 100 - sum(rule.weights.values()))
        weights = {**rule.weights, _CURRENT: rest}
        self._names = [*weights]
        self._bounds = [*accumulate(rule.weights.values())]
        self._hashes = [
            (name, share, blake2b(f"{model}\\0{name}\\0".encode(), digest_size=8))
            for name, share in weights.items()
            if share > 0
        ]
        keys = {by for by, _, _ in self._matches} | ({self.sticky} if self.sticky else set())
        self.keys: frozenset[RequestKey] = frozenset(keys)
        """The keys on which the choice depends."""
        self.needs_body = any(key.kind != "header" for key in keys)
        """True if the choice depends on more than headers."""

    def choose(self, value_of: ValueOf) -> str:
        """Return the number or label of the version; "" for the current one."""
        for by, value, version in self._matches:
            if value_of(by) == value:
                return version
        if not self._bounds:
            return _CURRENT
        if self.sticky is not None and (key := value_of(self.sticky)) is not None:
            return self._sticky(key)
        return self._names[bisect(self._bounds, random() * 100)]

    def _sticky(self, key: str) -> str:
        encoded, lowest, chosen = key.encode(), math.inf, _CURRENT
        for name, share, prefix in self._hashes:
            digest = prefix.copy()
            digest.update(encoded)
            # 53 bits, which a float holds exactly; the half keeps it above 0 and below 1.
            unit = ((int.from_bytes(digest.digest(), "little") >> 11) + 0.5) / (1 << 53)
            score = -math.log(unit) / share
            if score < lowest:
                lowest, chosen = score, name
        return chosen


def value_text(value: Any) -> str | None:
    """Return a request parameter's value as text: equal values of JSON and protobuf give equal texts."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def input_text(values: Any) -> str | None:
    """Return the first element of an input, an array or nested lists, as text; None if there is none."""
    while isinstance(values, list | tuple):
        if not values:
            return None
        values = values[0]
    if hasattr(values, "__dlpack__"):
        array = np.from_dlpack(values) if not isinstance(values, np.ndarray) else values
        values = array.flat[0] if array.size else None
    return value_text(values.item() if isinstance(values, np.generic) else values)
