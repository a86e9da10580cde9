"""The result of a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hps.errors import HpsError

Verdict = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """Result of one check; ``remedy`` is empty if there is nothing to do."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def attempt(name: str, check: Callable[[], DoctorCheck]) -> DoctorCheck:
    """Run ``check``; an error becomes its verdict."""
    try:
        return check()
    except HpsError as error:
        return failed(name, error)


def failed(name: str, error: HpsError, remedy: str = "see the message") -> DoctorCheck:
    """A failed check with the whole text of ``error``, which names cause and remedy."""
    return DoctorCheck(name, "FAIL", str(error), remedy)


def catch_errors(name: str, checks: Iterable[DoctorCheck]) -> Iterator[DoctorCheck]:
    """Yield ``checks``; an error of theirs becomes a failed check, so that other parts are still checked."""
    try:
        yield from checks
    except HpsError as error:
        yield failed(name, error)
    except Exception as error:  # another product may send anything
        found = f"cannot be checked: {type(error).__name__}: {error}"
        yield DoctorCheck(
            name, "FAIL", found, "see whether it is what the configuration takes it for"
        )
