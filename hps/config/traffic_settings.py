"""Traffic rule of a model: which version answers a request that names none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, StringConstraints

from hps.config.checks import ConfigFinding, finding
from hps.config.config_errors import InvalidConfiguration, validate
from hps.config.model_schema import StrictModel
from hps.errors import BadRequest

_REFERENCE = r"^([1-9][0-9]{0,18}|[a-zA-Z][a-zA-Z0-9_.\-]{0,63})$"
_AS_TEXT = BeforeValidator(lambda value: str(value) if type(value) is int else value)
VersionReference = Annotated[str, _AS_TEXT, StringConstraints(pattern=_REFERENCE)]
"""A served version, by its number or a label."""
KeySource = Annotated[str, StringConstraints(pattern=r"^(header|parameter|input):[^\s:]{1,200}$")]
_MATCH = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value),
    StringConstraints(max_length=200),
]
# Sums of percentages such as 33.3 + 33.3 + 33.4 exceed 100 by the rounding of floats.
_ROUNDING = 1e-9


class RequestKey(NamedTuple):
    """Where a request has a value: ``kind`` is ``header``, ``parameter`` or ``input``."""

    kind: Literal["header", "parameter", "input"]
    name: str

    @classmethod
    def parse(cls, text: str) -> RequestKey:
        """Parse a `KeySource`. Names of headers are in lower case."""
        kind, _, name = text.partition(":")
        assert kind in ("header", "parameter", "input")
        return cls(kind, name.lower() if kind == "header" else name)  # type: ignore[arg-type]


class TrafficMatch(StrictModel):
    """Requests with a given value get a given version."""

    by: KeySource
    """The place of the value: `header:<name>`, `parameter:<name>` or `input:<name>`."""
    value: _MATCH
    """The value; of an input the first element, as decimal text."""
    version: VersionReference
    """The version's number or label."""


class ShadowSettings(StrictModel):
    """Requests to the current version that are mirrored to another version, whose answers are compared."""

    version: VersionReference
    """The version's number or label."""
    rate: float = Field(1.0, gt=0, le=1)
    """The share of the requests to the current version."""
    tolerance: float = Field(1e-4, ge=0)
    """Largest absolute difference of two values that count as equal."""


class RollbackBounds(StrictModel):
    """Bounds that a new version must keep; if it leaves them, requests go back to the former version."""

    watch_s: float = Field(600.0, ge=1)
    """Time for which a version is watched after it has become current or got a share."""
    min_requests: int = Field(200, ge=1)
    """Requests of the version before it is judged."""
    max_error_rate: float | None = Field(0.01, ge=0, le=1)
    """Share of failed requests above that of the compared version; null: no bound."""
    max_p99_ratio: float | None = Field(2.0, gt=1)
    """99th percentile of the latency as a multiple of the compared version's; null: no bound."""
    max_psi: float | None = Field(0.25, gt=0)
    """Population stability index of the scores against the compared version's; null: no bound."""


class TrafficRule(StrictModel):
    """Which version answers requests that name no version; default: the current one."""

    weights: dict[Annotated[str, _AS_TEXT], float] = {}
    """Percentages of the requests by version, a number or a label; the rest goes to the current version."""
    sticky: KeySource | None = None
    """The key whose hash chooses by the weights, as `header:<name>`, `parameter:<name>` or `input:<name>`, so
    that requests with one key get one version; null: at random."""
    matches: list[TrafficMatch] = []
    """Requests that get a version by a value, before weights are applied; the first match counts."""
    shadow: ShadowSettings | None = None
    """Requests that another version answers, too, for a comparison."""
    rollback: RollbackBounds | None = None
    """Bounds for an automatic rollback; null: none."""

    def violations(self) -> Iterator[ConfigFinding]:
        for name, share in self.weights.items():
            if not re.match(_REFERENCE, name):
                yield finding("weights", f"{name[:80]!r} is neither a version's number nor a label")
            if not 0 < share <= 100:
                message = (
                    f"version {name[:80]} has {share:g} percent; it must be above 0 and at most 100"
                )
                yield finding("weights", message)
                return
        if sum(self.weights.values()) > 100 + _ROUNDING:
            total = f"{sum(self.weights.values()):g}"
            yield finding("weights", f"have a sum of {total}, which must be at most 100 (percent)")
        if self.sticky is not None and not self.weights:
            yield finding("sticky", "chooses by weights, but there are none", "weights")

    @property
    def references(self) -> set[str]:
        """The numbers and labels that the rule names."""
        shadow = set() if self.shadow is None else {self.shadow.version}
        return {*self.weights, *(each.version for each in self.matches), *shadow}

    @property
    def splits(self) -> bool:
        """True if not all requests without a version get the current one."""
        return bool(self.weights or self.matches)

    def without(self, references: set[str], *, matches: bool = True) -> TrafficRule | None:
        """Without what names ``references``, with their ``matches``; None if nothing is left."""
        weights = {name: share for name, share in self.weights.items() if name not in references}
        shadow = self.shadow
        left = TrafficRule(
            weights=weights,
            sticky=self.sticky if weights else None,
            matches=[
                each for each in self.matches if not matches or each.version not in references
            ],
            shadow=None if shadow is not None and shadow.version in references else shadow,
            rollback=self.rollback,
        )
        return left if left.splits or left.shadow or left.rollback else None

    def as_json(self) -> dict[str, Any]:
        """What differs from the defaults; see `from_json`."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> TrafficRule:
        """Raises ValueError for something else."""
        return cls.model_validate(found)


def parse_rule(found: Any) -> TrafficRule | None:
    """Return the rule of a request; None for an empty one. Raises ``BadRequest`` that names every fault."""
    if found is None:
        return None
    try:
        rule = validate(TrafficRule, found, lambda _path: "traffic rule")
    except InvalidConfiguration as error:
        raise BadRequest("; ".join(str(error).splitlines())) from None
    return rule if rule.splits or rule.shadow or rule.rollback else None
