"""Metrics, labels and values in PromQL expressions; not a parser, but enough for ours."""

from __future__ import annotations

import re
from typing import NamedTuple

_SELECTED = re.compile(r"\b(hps[_:][a-z0-9_:]+|process_[a-z_]+|up|nv_[a-z_]+)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
_GROUPED = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")


class Selected(NamedTuple):
    """A metric that an expression reads, and its matchers: label and value."""

    name: str
    matchers: list[tuple[str, str]]


def selected(expression: str) -> list[Selected]:
    found = []
    for name, matchers in _SELECTED.findall(expression):
        pairs = [(label, value) for label, _, value in _MATCHER.findall(matchers)]
        found.append(Selected(name, pairs))
    return found


def grouped(expression: str) -> set[str]:
    """The labels that it groups or matches by."""
    lists = _GROUPED.findall(expression)
    return {label.strip() for each in lists for label in each.split(",") if label.strip()}
