"""Staleness limit per model: set by a thread, read by requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

from hps.errors import Unavailable
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from hps.types import EmbeddingTable, LookupResult, PredictResult

OnStale = Literal["flag", "refuse"]
Result = TypeVar("Result", bound=LookupResult | PredictResult)


class Freshness:
    """Staleness of one model. Without ``limit_s`` it is never stale.

    One thread calls `judge`. Requests read ``stale_s`` and ``refusal`` without a lock, and call a
    method only if one of them is set."""

    __slots__ = ("_flagged", "_limit_s", "_on_stale", "_refused", "refusal", "stale_s")

    def __init__(
        self,
        model: str = "",
        limit_s: float | None = None,
        on_stale: OnStale = "flag",
        metrics: Metrics | None = None,
    ) -> None:
        counted = metrics or Metrics()
        self._limit_s = limit_s
        self._on_stale = on_stale
        self._flagged = counted.counter(m.STALE_ANSWERS, model, "flagged")
        self._refused = counted.counter(m.STALE_ANSWERS, model, "refused")
        self.stale_s = 0
        """Possible age of the model's rows in whole seconds if above the limit; else 0."""
        self.refusal: str | None = None
        """Reason why requests are rejected; None if they are not."""

    def judge(self, ages_s: Mapping[EmbeddingTable, float]) -> None:
        """Set the two attributes from the ages of the model's tables."""
        table, age_s = max(ages_s.items(), key=lambda each: each[1])
        if self._limit_s is None or age_s <= self._limit_s:
            self.stale_s, self.refusal = 0, None
            return
        self.stale_s = max(1, int(age_s))
        if self._on_stale == "refuse":
            self.refusal = (
                f"updates of table '{table.name}' have been waiting for {self.stale_s} s, more than "
                f"updates.max_staleness_s allows ({self._limit_s:g} s); ask another replica, or see "
                "`hps updates status`"
            )

    def require(self) -> None:
        """Raise Unavailable, and count it, while requests are rejected."""
        if self.refusal is not None:
            self._refused.add()
            raise Unavailable(self.refusal)

    def flag(self) -> int:
        """Return ``stale_s``, and count the answer if it is not 0."""
        if self.stale_s:
            self._flagged.add()
        return self.stale_s

    def mark(self, result: Result) -> Result:
        """Return ``result``, flagged if it may be stale."""
        if self.stale_s:
            result.stale_s = self.flag()
        return result


FRESH = Freshness()
"""Freshness of models without a limit."""
