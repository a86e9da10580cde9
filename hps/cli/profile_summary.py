"""Summary of several requests' profiles: time per part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

REST = "rest"
"""Time of a part outside all of its parts."""
Path = tuple[str, ...]


def account(profiles: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise the profiles of one model's requests.

    Mean times add up: those of the parts and ``rest`` give that of the whole."""
    times: dict[Path, list[float]] = {}
    for number, profile in enumerate(profiles):
        for path, us in _parts(profile, ()):
            mine = times.setdefault(path, [0.0] * len(profiles))
            mine[number] += us
    whole = times[()]
    return {
        "requests": len(profiles),
        "mean_us": float(np.mean(whole)),
        "p50_us": float(np.quantile(whole, 0.5)),
        "p99_us": float(np.quantile(whole, 0.99)),
        "about": dict(profiles[-1]["about"]),
        "keys": keys_of(profiles),
        "parts": [
            {
                "path": list(path),
                "mean_us": float(np.mean(each)),
                "share": float(np.sum(each) / max(np.sum(whole), 1e-9)),
                "p50_us": float(np.quantile(each, 0.5)),
                "p99_us": float(np.quantile(each, 0.99)),
                "requests": sum(us > 0 for us in each),
            }
            for path, each in _in_order(times)
            if path
        ],
    }


def keys_of(profiles: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Number of keys in the lookups, and the share that each tier answered.

    ``default`` are keys without a row. Empty if a lookup is not timed by tier, as on a GPU."""
    counts: dict[str, int] = {}
    for lookup in (each for profile in profiles for each in _lookups(profile)):
        keys, found = lookup["about"]["keys"], {"default": lookup["about"].get("defaulted", 0)}
        tiers = [part for part in lookup["parts"] if "found" in part["about"]]
        # Tiers count distinct keys; apply their shares to all keys that had a row.
        distinct = sum(part["about"]["found"] for part in tiers)
        with_row = keys - found["default"]
        for part in tiers:
            name, share = part["name"], part["about"]["found"] / max(distinct, 1)
            found[name] = found.get(name, 0) + with_row * share
        if not distinct:
            found["memory"] = with_row
        for name, number in found.items():
            counts[name] = counts.get(name, 0) + number
    total = sum(counts.values())
    return {"asked": round(total), "from": {n: v / total for n, v in counts.items() if v}}


def _lookups(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The lookups in a profile that have keys; not those that only contain another lookup."""
    inner = [found for each in part["parts"] for found in _lookups(each)]
    if inner or part["name"] != "lookup" or "keys" not in part["about"]:
        return inner
    return [part]


def _parts(profile: Mapping[str, Any], path: Path) -> Iterable[tuple[Path, float]]:
    whole = profile["us"] or 0.0
    yield path, whole
    if not profile["parts"]:
        return
    for part in profile["parts"]:
        yield from _parts(part, (*path, part["name"]))
    rest = whole - sum(part["us"] or 0.0 for part in profile["parts"])
    yield (*path, REST), max(0.0, rest)


def _in_order(times: Mapping[Path, list[float]]) -> list[tuple[Path, list[float]]]:
    """Sort: a part before its own parts, siblings by first occurrence, ``rest`` last."""
    known = list(times)

    def rank(path: Path) -> tuple[tuple[bool, int], ...]:
        heads = (path[: i + 1] for i in range(len(path)))
        return tuple((head[-1] == REST, known.index(head)) for head in heads)

    return sorted(times.items(), key=lambda each: rank(each[0]))
