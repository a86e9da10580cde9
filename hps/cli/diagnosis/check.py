"""What a check finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hps.errors import HpsError

Verdict = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, and what to do about it unless all is well."""

    name: str
    verdict: Verdict
    found: str
    mend: str = ""


def attempt(name: str, check: Callable[[], Check]) -> Check:
    """An error becomes the check's verdict."""
    try:
        return check()
    except HpsError as error:
        return failed(name, error)


def failed(name: str, error: HpsError, mend: str = "see the message") -> Check:
    """Our errors read "cause; mend"."""
    found, _, told = str(error).partition("; ")
    return Check(name, "FAIL", found, told or mend)
