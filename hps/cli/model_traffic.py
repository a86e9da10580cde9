"""``hps model traffic``: which versions of a model a running server sends requests to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from hps.cli.command_options import argument, option
from hps.cli.options import AdminServer, ReportOptions
from hps.tools.output import FormattedNumber, print_line, print_table

TRAFFIC_EXAMPLES = """\b
Examples:
  hps model traffic ctr                      # show the rule
  hps model traffic ctr --weight 4=10        # 10 % to version 4, a canary
  hps model traffic ctr --weight canary=10 --sticky header:x-user-id
  hps model traffic ctr --match header:x-group=b:canary    # an A/B test
  hps model traffic ctr --shadow canary --shadow-rate 0.1  # compare answers
  hps model traffic ctr --rollback --max-p99-ratio 1.5
  hps model traffic ctr --remove all
"""
_PARTS = ("weights", "sticky", "matches", "shadow", "rollback")


@dataclass(frozen=True, kw_only=True)
class TrafficOptions(ReportOptions):
    name: str = argument()
    """The model."""
    admin: AdminServer
    weight: list[str] | None = option(None, "--weight", metavar="VERSION=PERCENT")
    """A version's percentage of the requests that name no version; may be repeated. The rest goes to the
    current version. Replaces all percentages."""
    sticky: str | None = option(None, "--sticky", metavar="KEY")
    """A header, parameter or input whose hash chooses by the percentages: header:NAME, parameter:NAME or
    input:NAME."""
    match: list[str] | None = option(None, "--match", metavar="KEY=VALUE:VERSION")
    """A version for requests with this value; may be repeated. Replaces all matches."""
    shadow: str | None = option(None, "--shadow", metavar="VERSION")
    """A version that answers requests to the current one, too, for a comparison."""
    shadow_rate: float | None = option(None, "--shadow-rate", min=0.0, max=1.0)
    """The share of the requests for the shadow version."""
    shadow_tolerance: float | None = option(None, "--shadow-tolerance", min=0.0)
    """Largest absolute difference of equal values."""
    rollback: bool = option(False, "--rollback")
    """Roll back a new version automatically when it leaves the bounds."""
    watch_s: float | None = option(None, "--watch-s")
    """Seconds for which a new version is watched."""
    min_requests: int | None = option(None, "--min-requests")
    """Requests of a version before it is judged."""
    max_error_rate: float | None = option(None, "--max-error-rate")
    """Bound of the share of failed requests, above the compared version's."""
    max_p99_ratio: float | None = option(None, "--max-p99-ratio")
    """Bound of the p99 latency, as a multiple of the compared version's."""
    max_psi: float | None = option(None, "--max-psi")
    """Bound of the population stability index of the scores."""
    remove: list[str] | None = option(None, "--remove", metavar="PART")
    """A part of the rule: weights, sticky, matches, shadow, rollback, or all."""

    def changes(self) -> dict[str, Any]:
        """The parts of the rule to set. Raises BadRequest."""
        found: dict[str, Any] = {}
        if self.weight:
            found["weights"] = dict(_weight(each) for each in self.weight)
        if self.sticky is not None:
            found["sticky"] = self.sticky
        if self.match:
            found["matches"] = [_match(each) for each in self.match]
        return found

    def shadow_changes(self) -> dict[str, Any]:
        names = (
            ("version", self.shadow),
            ("rate", self.shadow_rate),
            ("tolerance", self.shadow_tolerance),
        )
        found = {name: value for name, value in names if value is not None}
        _require_finite({f"--shadow-{name}": value for name, value in found.items()})
        return found

    def rollback_changes(self) -> dict[str, Any]:
        names = ("watch_s", "min_requests", "max_error_rate", "max_p99_ratio", "max_psi")
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        _require_finite({f"--{name.replace('_', '-')}": value for name, value in found.items()})
        return found

    def removed(self) -> set[str]:
        """The parts of the rule to remove. Raises BadRequest."""
        from hps.errors import BadRequest

        removed = set(self.remove or ())
        if unknown := sorted(removed - {*_PARTS, "all"}):
            raise BadRequest(f"--remove {unknown[0]}: the parts are {', '.join(_PARTS)} and all")
        return {*_PARTS} if "all" in removed else removed


def traffic(options: TrafficOptions) -> None:
    """Show or change which versions answer requests.

    Applies to requests that name no version. Parts of the rule that are not given stay as they are."""
    _changed({}, options)  # errors of the options come before those of the connection
    path = f"/v2/repository/models/{quote(options.name, safe='')}/traffic"
    with options.admin.open() as client:
        found = client.ask(path)
        rule = _changed(dict(found["rule"]), options)
        if rule != found["rule"]:
            found = client.ask(path, {"parameters": rule})
    options.report(found, _show)


def _changed(rule: dict[str, Any], options: TrafficOptions) -> dict[str, Any]:
    removed = options.removed()
    rule = {name: value for name, value in rule.items() if name not in removed}
    rule |= options.changes()
    if shadow := options.shadow_changes():
        rule["shadow"] = rule.get("shadow", {}) | shadow
    bounds = options.rollback_changes()
    if bounds or options.rollback:
        rule["rollback"] = rule.get("rollback", {}) | bounds
    if "weights" in removed and not options.weight:
        rule.pop("sticky", None)
    return rule


def _weight(text: str) -> tuple[str, float]:
    from hps.errors import BadRequest

    version, equals, share = text.rpartition("=")
    try:
        percent = float(share.removesuffix("%"))
        if not (equals and math.isfinite(percent)):
            raise ValueError
        return version, percent
    except ValueError:
        raise BadRequest(f"--weight {text}: expected VERSION=PERCENT, such as 4=10") from None


def _require_finite(values: dict[str, Any]) -> None:
    """Raise BadRequest for an option that is nan or infinite, which JSON has no number for."""
    from hps.errors import BadRequest

    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise BadRequest(f"{name} {value}: expected a finite number")


def _match(text: str) -> dict[str, str]:
    from hps.errors import BadRequest

    by, equals, rest = text.partition("=")
    value, colon, version = rest.rpartition(":")
    if not (equals and colon):
        raise BadRequest(
            f"--match {text}: expected KEY=VALUE:VERSION, such as header:x-group=b:canary"
        )
    return {"by": by, "value": value, "version": version}


def _show(found: dict[str, Any]) -> None:
    versions = found["versions"]
    rows = [(FormattedNumber(v["version"]), FormattedNumber(f"{v['weight']:g}")) for v in versions]
    print_table(("version", "percent"), rows)
    for each in versions:
        if each["reason"]:
            print_line(f"version {each['version']} was rolled back: {each['reason']}")
    for line in _described(found["rule"]):
        print_line(line)


def _described(rule: dict[str, Any]) -> list[str]:
    lines = [
        f"{each['by']} = {each['value']}: version {each['version']}"
        for each in rule.get("matches", ())
    ]
    if "sticky" in rule:
        lines.append(f"sticky by {rule['sticky']}")
    if (shadow := rule.get("shadow")) is not None:
        share = 100 * shadow.get("rate", 1.0)
        lines.append(f"{share:g} % of the requests also go to version {shadow['version']}")
    if (bounds := rule.get("rollback")) is not None:
        stated = ", ".join(
            f"{name} {'off' if value is None else format(value, 'g')}"
            for name, value in bounds.items()
        )
        lines.append(f"automatic rollback{': ' if stated else ''}{stated}")
    return lines
