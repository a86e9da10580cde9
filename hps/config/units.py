"""Hints for values with a unit, such as "4GB" or "500ms": settings take plain numbers."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])(i?)b?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|min|h|d)", re.IGNORECASE)
_POWERS = "kmgt"
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_NAMES = {"us": "microseconds", "ms": "milliseconds", "s": "seconds"}


def unit_hint(key: str, value: str) -> str:
    """``; sizes are in bytes: …`` if ``value`` of ``key`` is a size, similarly for a time; else ""."""
    unit = key.rpartition("_")[2]
    if (unit == "bytes" or key == "block_size") and (match := _SIZE.fullmatch(value)):
        number, letter = float(match[1]), match[2].lower()
        power = _POWERS.index(letter) + 1
        name = letter if letter == "k" else letter.upper()
        decimal, binary = round(number * 1000**power), round(number * 1024**power)
        if match[3]:
            return f"; sizes are in bytes: write {binary}"
        return f"; sizes are in bytes: write {decimal}, or {binary} for {match[1]} {name}iB"
    if unit in _NAMES and (match := _TIME.fullmatch(value)):
        seconds = float(match[1]) * _SECONDS[match[2].lower()]
        return f"; times are in {_NAMES[unit]} here: write {seconds / _SECONDS[unit]:g}"
    return ""
