"""A key trace of a model: which keys its requests ask of which table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hps.errors import BadRequest
from hps.lookup.base import features_by_input
from hps.lookup.key_sampling import MAX_ACCESSES, MAX_KEYS, KeySampler, TableSample
from hps.suggestions import hint_for
from hps.tools.plan.model import PlannedModel
from hps.types import IndexArray, KeyArray

FEWEST_ACCESSES = 1_000
"""Accesses that a trace must have at least."""
# Sampled accesses of all tables together: 24 bytes each.
_ALL_ACCESSES = 1 << 25


@dataclass(frozen=True, slots=True)
class Trace:
    """Samples of a trace's accesses by table, its number of requests, and their samples on average."""

    samples: Mapping[str, TableSample]
    requests: int
    batch: float = 1.0

    @property
    def accesses(self) -> int:
        return sum(sample.accesses for sample in self.samples.values())


class TraceCollector:
    """Collects the keys of requests to ``model``, with a sample of at most ``max_keys`` keys per table."""

    def __init__(self, model: PlannedModel, max_keys: int = MAX_KEYS) -> None:
        self._model = model
        self._inputs = features_by_input(model.features)
        most = min(MAX_ACCESSES, max(1 << 16, _ALL_ACCESSES // max(1, len(model.tables))))
        self._samplers = {name: KeySampler(max_keys, most) for name in model.tables}
        self._requests = self._samples = 0

    @property
    def requests(self) -> int:
        """The number of requests so far."""
        return self._requests

    @property
    def names(self) -> list[str]:
        """The names that keys may have: those of features, and of tables."""
        return list(dict.fromkeys([*self._inputs, *self._model.tables]))

    @property
    def only_name(self) -> str | None:
        """The name of the model's only feature, or only table; None if it has several."""
        for names in (list(self._inputs), list(self._model.tables)):
            if len(names) == 1:
                return names[0]
        return None

    def check_name(self, name: str, where: str) -> None:
        """Raise BadRequest, in which ``where`` names the file, unless ``name`` is a feature or a table."""
        if name not in self.names:
            hint = hint_for(name, self.names, "its features and tables are")
            raise BadRequest(
                f"{where}: model {self._model.name} has no feature or table {name!r}{hint}"
            )

    def add(self, parts: Mapping[str, tuple[KeyArray, IndexArray]], samples: int) -> None:
        """Add the next ``samples``: by feature or table, ``keys (n,)`` and their ``requests (n,)``.

        Requests are numbered from 0 on; they ascend in each part, and from call to call. Keys of a feature
        are those of requests: its offset is added here."""
        self._samples += samples
        of_table: dict[str, list[tuple[KeyArray, IndexArray]]] = {}
        for name, (keys, requests) in parts.items():
            if not len(keys):
                continue
            self._requests = max(self._requests, int(requests[-1]) + 1)
            for feature in self._inputs.get(name, ()):
                of_table.setdefault(feature.table.name, []).append((feature.shift(keys), requests))
            if name not in self._inputs:
                narrowed = self._model.tables[name].table.narrow(keys)
                of_table.setdefault(name, []).append((narrowed, requests))
        for name, found in of_table.items():
            self._samplers[name].add(*_merged(found))

    def trace(self) -> Trace:
        """Return the trace. Raises BadRequest if it is empty or too short to plan by."""
        samples = {name: each.sample() for name, each in self._samplers.items()}
        used = {n: s for n, s in samples.items() if s.accesses}
        return checked(Trace(used, self._requests, self._samples / max(1, self._requests)))


def checked(trace: Trace) -> Trace:
    """Return ``trace``. Raises BadRequest if it is empty or too short to plan by."""
    if not trace.samples:
        raise BadRequest("the trace is empty: it has no keys of any table; record some requests")
    if trace.accesses < FEWEST_ACCESSES:
        raise BadRequest(
            f"the trace has {trace.accesses:,} keys, too few to plan by; record at least "
            f"{FEWEST_ACCESSES:,}, better several times the rows of a cache"
        )
    return trace


def _merged(parts: Sequence[tuple[KeyArray, IndexArray]]) -> tuple[KeyArray, IndexArray]:
    """Join the accesses of several features, in the order of their requests."""
    if len(parts) == 1:
        return parts[0]
    keys, requests = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.argsort(requests, kind="stable")
    return keys[order], requests[order]
