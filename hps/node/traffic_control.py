"""Change the traffic rule of a served model: by request, or when a new version leaves the rule's bounds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from hps.config.traffic_settings import TrafficRule
from hps.errors import BadRequest, NotFound, Unavailable
from hps.node.node import Node
from hps.node.version_choice import RecentSwitch, VersionChoice
from hps.node.version_switcher import VersionSwitcher
from hps.observability import metric_names as m

log = logging.getLogger(__name__)


class _Rollback(Protocol):
    def __call__(self, name: str, *, automatic: str, replaced: int) -> int: ...


class TrafficControl:
    """Changes the traffic rules of one open node. Any thread may call it."""

    def __init__(
        self,
        node: Node,
        switcher: VersionSwitcher,
        change: Callable[[str, Callable[[VersionChoice], VersionChoice], str], None],
        rollback: _Rollback,
    ) -> None:
        """``change`` serves another choice of a model, as a function of the present one, for a reason; it
        raises NotFound. ``rollback`` makes the previous version the current one."""
        self._node, self._switcher = node, switcher
        self._change, self._rollback = change, rollback
        self._at_start = dict(switcher.choices)

    def set_rule(self, name: str, rule: TrafficRule | None) -> None:
        """Set which versions answer requests without a version, and when the node rolls back; None: the
        current one, never.

        Raises ``BadRequest`` for a version or label that is not served, and ``NotFound``."""

        def ruled(choice: VersionChoice) -> VersionChoice:
            for reference in sorted(set() if rule is None else rule.references):
                try:
                    self._node.models.find(name, reference)
                except NotFound as error:
                    raise BadRequest(f"the traffic rule names '{reference}': {error}") from None
            if rule is not None and (
                given := choice.references_to({choice.current}) & {*rule.weights}
            ):
                raise BadRequest(
                    f"version {min(given)} is the current one of model '{name}', which gets the requests "
                    "that the weights leave; give weights to other versions only"
                )
            return choice.with_traffic(rule)

        self._change(name, ruled, "traffic")
        log.info("model %s: traffic rule %s", name, "removed" if rule is None else rule.as_json())

    def choice(self, name: str) -> VersionChoice | None:
        """What is served of a model; None: nothing."""
        return self._switcher.choices.get(name)

    def switch_before_start(self, name: str) -> RecentSwitch | None:
        """The switch to the current version of a model if it was made before the node started, else None."""
        choice, at_start = self.choice(name), self._at_start.get(name)
        if choice is None or at_start is None or at_start.current != choice.current:
            return None
        if at_start.previous is None or not at_start.switched_at:
            return None
        return RecentSwitch(at_start.previous, max(0.0, time.time() - at_start.switched_at))

    def roll_back(self, name: str, version: int, reason: str, detail: str) -> int | None:
        """Take the requests from ``version``; returns the current version then, None if nothing changed.

        A version with a share loses it; the current version is replaced by the previous one. ``reason`` is
        ``errors``, ``latency`` or ``scores``; ``detail`` is a sentence for the operator. Raises as
        `ModelControl.rollback`."""
        choice = self.choice(name)
        if choice is None or (version == choice.current and choice.previous is None):
            return None
        if version == choice.current:
            try:
                self._rollback(name, automatic=detail, replaced=version)
            except NotFound:
                return None  # unloaded meanwhile
            except Unavailable:
                changed = self.choice(name)
                if changed is not None and changed.current != version:
                    return None  # replaced meanwhile
                raise
        else:
            self._change(
                name,
                lambda choice: choice.without_share({version}, detail, matches=True),
                "automatic",
            )
        after = self.choice(name)
        if after is None or version not in after.rolled_back:
            return None
        self._node.metrics.counter(m.MODEL_AUTOMATIC_ROLLBACKS, name, reason).add()
        log.warning(
            "model %s: version %d rolled back automatically, version %d answers its requests: %s",
            name,
            version,
            after.current,
            detail,
        )
        return after.current


def require_unnamed(name: str, choice: VersionChoice, reference: str) -> None:
    """Raise BadRequest if the traffic rule names a version's number or a label."""
    if choice.traffic is not None and reference in choice.traffic.references:
        raise BadRequest(
            f"the traffic rule of model '{name}' names '{reference}'; change or remove the rule first "
            f"(hps model traffic {name})"
        )
