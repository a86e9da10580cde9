"""Counting of batches that the native scheduler completed from host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.lookup.gpu.miss_fill import HostCaches
from hps.observability.meters import LookupMeter, TierMeter
from hps.predict.scheduler.columns import ModelColumns
from hps.types import Source

_GPU = int(Source.GPU)


class FillReporter:
    """Counts the filled batches of a model, and promotes some of the rows that the device missed.

    ``lookups`` gets the keys of requests that the lanes answered, ``tiers`` the fetches of the GPU cache and
    those of the CPU cache. One thread at a time."""

    def __init__(
        self,
        columns: ModelColumns,
        host: HostCaches,
        lookups: LookupMeter,
        tiers: tuple[TierMeter, TierMeter],
    ) -> None:
        self._features = columns.features
        self._hotness = np.array(columns.hotness, np.int64)
        self._host, self._lookups = host, lookups
        self._tier, self._host_tier = tiers

    def __call__(self, report: Mapping[str, Any]) -> None:
        """Take a report of `BatchScheduler.take_report`."""
        self._count_tiers(report)
        if report["answered"]:
            filled = self._per_feature(report["filled"])
            direct = report["answered"] * self._hotness - filled
            answers, names = [], []
            for code, counts in ((_GPU, direct), (self._host.code, filled)):
                for feature, n in zip(self._features, counts.tolist(), strict=True):
                    if n:
                        answers.append((feature.table, code, n))
                        names.append(feature.name)
            self._lookups.counted_all(answers, report["request_s"].tolist(), names)
        self._promote(report["features"], report["keys"])

    def _count_tiers(self, report: Mapping[str, Any]) -> None:
        missed, found = self._per_feature(report["missed"]), self._per_feature(report["found"])
        asked = report["samples"] * self._hotness
        if report["samples"]:
            each = zip(self._features, asked.tolist(), missed.tolist(), strict=True)
            counts = [(f.table, n, n - missing) for f, n, missing in each]
            self._tier.counted_all(counts, report["fetch_s"].tolist())
        hits = [(f.table, n, n) for f, n in zip(self._features, found.tolist(), strict=True) if n]
        if hits:
            self._host_tier.counted_all(hits, report["gather_s"].tolist())

    def _per_feature(self, counts: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return ``counts``, empty if all are 0."""
        filled = np.zeros(len(self._features), np.int64)
        filled[: len(counts)] = counts
        return filled

    def _promote(self, features: NDArray[np.uint32], keys: NDArray[np.int64]) -> None:
        order = np.argsort(features, kind="stable")
        ends = np.cumsum(np.bincount(features, minlength=len(self._features)))
        for feature, own in zip(self._features, np.split(keys[order], ends[:-1]), strict=True):
            if len(own):
                self._host.promote(feature.table, own)
