"""What a check finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hps.errors import HpsError

Verdict = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """What was looked at, what was found, and what to do about it unless all is well."""

    name: str
    verdict: Verdict
    found: str
    mend: str = ""


def attempt(name: str, check: Callable[[], DoctorCheck]) -> DoctorCheck:
    """An error becomes the check's verdict."""
    try:
        return check()
    except HpsError as error:
        return failed(name, error)


def failed(name: str, error: HpsError, mend: str = "see the message") -> DoctorCheck:
    """``error`` in full: it names cause and remedy, and either may have a semicolon."""
    return DoctorCheck(name, "FAIL", str(error), mend)


def catch_errors(name: str, checks: Iterable[DoctorCheck]) -> Iterator[DoctorCheck]:
    """``checks``, and one more that fails where they end in an error: what one part does must not keep the
    others from being looked at."""
    try:
        yield from checks
    except HpsError as error:
        yield failed(name, error)
    except Exception as error:  # of another product, it may say anything
        found = f"cannot be looked at: {type(error).__name__}: {error}"
        yield DoctorCheck(
            name, "FAIL", found, "see whether it is what the configuration takes it for"
        )
