""" "Did you mean" hints for unknown names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

# Comparing takes a microsecond per character; longer names get no suggestion.
_LONGEST = 500


def hint_for(name: object, known: Iterable[str], listing: str = "it has") -> str:
    """``; did you mean 'x'?`` for the nearest of ``known``; else all of them: ``; <listing> x, y``."""
    names = list(known)
    return did_you_mean(name, names) or f"; {listing} {name_list(names)}"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest of ``known`` regardless of case; else an empty string."""
    if len(str(name)) > _LONGEST:
        return ""
    by_folded = {each.lower(): each for each in known}
    near = get_close_matches(str(name).lower(), by_folded, n=1, cutoff=0.6)
    return f"; did you mean {by_folded[near[0]]!r}?" if near else ""


def name_list(names: Sequence[str], limit: int = 12) -> str:
    """Join ``names`` with commas; of more than ``limit``, the first and the count."""
    shown = ", ".join(names[:limit]) or "none"
    return shown if len(names) <= limit else f"{shown}, … ({len(names)} in all)"
