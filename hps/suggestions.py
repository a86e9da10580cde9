"""What a message says about a name that nobody knows: the nearest one there is, or all there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

# Looking for what is near takes a microsecond for each character; no name is longer.
_LONGEST = 500


def hint_for(name: object, known: Iterable[str], listing: str = "it has") -> str:
    """``; did you mean 'x'?`` for the nearest of ``known``; without one ``; it has x, y``, in the words of
    ``listing``."""
    names = list(known)
    return did_you_mean(name, names) or f"; {listing} {name_list(names)}"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest of ``known``, or the empty string. Case does not count."""
    if len(str(name)) > _LONGEST:
        return ""
    by_folded = {each.lower(): each for each in known}
    near = get_close_matches(str(name).lower(), by_folded, n=1, cutoff=0.6)
    return f"; did you mean {by_folded[near[0]]!r}?" if near else ""


def name_list(names: Sequence[str], limit: int = 12) -> str:
    """The names as a readable list, cut short when there are many."""
    shown = ", ".join(names[:limit]) or "none"
    return shown if len(names) <= limit else f"{shown}, … ({len(names)} in all)"
