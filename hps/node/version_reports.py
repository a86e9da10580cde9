"""Log lines, metrics and warnings about the served versions of a node and their changes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping

from hps.node.phase_times import PhaseTimes
from hps.node.served_versions import ServedModels
from hps.node.version_choice import VersionChoice
from hps.observability import metric_names as m
from hps.observability.metric_traffic import ROLLBACK_REASONS
from hps.observability.metrics import Metrics

log = logging.getLogger(__name__)


class VersionReports:
    """Reports of one node, whose served ``models`` are asked for at each scrape. Thread-safe."""

    def __init__(self, metrics: Metrics, models: Callable[[], ServedModels]) -> None:
        self._metrics, self._models = metrics, models
        self._lock = threading.Lock()
        self.warnings: Mapping[str, str] = {}
        """Warnings about loaded versions, by model."""
        for name in models():
            self._create_counters(name)
        metrics.gauges(m.MODEL_SERVED, self._served_gauge)
        metrics.gauges(m.MODEL_LABEL, self._label_gauge)

    def unloaded(self, name: str) -> None:
        self._warn(name, "")
        log.info("model %s: unloaded", name)

    def loaded(self, name: str, version: int, warning: str, times: PhaseTimes) -> None:
        self._warn(name, warning)
        self._metrics.counter(m.MODEL_LOADS, name, "served").add()
        self._create_counters(name)
        log.info("model %s: version %d is served after %s", name, version, times)

    def switched(self, name: str, version: int, reason: str) -> None:
        """``reason``: why it has become the current version."""
        self._metrics.counter(m.MODEL_SWITCHES, name, reason).add()
        log.info("model %s: version %d is the current one (%s)", name, version, reason)

    def labels_changed(
        self, name: str, former: VersionChoice | None, choice: VersionChoice | None, reason: str
    ) -> None:
        """Log each label that has another version in ``choice``, or none, than in ``former``."""
        before, after = ({} if each is None else each.labels for each in (former, choice))
        for label in sorted({*before, *after}):
            if (old := before.get(label)) != (new := after.get(label)):
                log.info(
                    "model %s: label '%s' changed: version %s -> %s (%s)",
                    *(name, label, old or "none", new or "none", reason),
                )

    def _warn(self, name: str, warning: str) -> None:
        with self._lock:
            others = {model: text for model, text in self.warnings.items() if model != name}
            self.warnings = others | ({name: warning} if warning else {})
        if warning:
            log.warning("model %s: %s", name, warning)

    def _create_counters(self, name: str) -> None:
        """Create the counters at the start: an alert would miss the first increment otherwise."""
        self._metrics.counter(m.MODEL_SWITCHES, name, "load")
        self._metrics.counter(m.MODEL_LOADS, name, "failed")
        for result in ("settled", "timed_out", "failed"):
            self._metrics.counter(m.MODEL_WARM_UPS, name, result)
        for reason in ROLLBACK_REASONS:
            self._metrics.counter(m.MODEL_AUTOMATIC_ROLLBACKS, name, reason)

    def _served_gauge(self) -> Iterator[tuple[tuple[str, ...], float]]:
        models = self._models()
        for each in models.versions:
            yield (each.name, str(each.version)), models[each.name] is each

    def _label_gauge(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for name, names in self._models().names.items():
            for label, version in names.labels.items():
                yield (name, label), version
