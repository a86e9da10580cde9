"""The server under test, sample requests, and the check itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from tritonclient.utils import np_to_triton_dtype

from hps.client import Tls

Protocol = Literal["http", "grpc"]
T = TypeVar("T")
Check = Callable[..., None]
_SETTLES_S, _PAUSE_S = 10.0, 0.05
_NOTED: ContextVar[list[str]] = ContextVar("noted")


class Deviation(AssertionError):
    """The server deviates from the protocol: ``found``, a text for each deviation."""

    def __init__(self, *found: str) -> None:
        super().__init__("\n".join(found))
        self.found = found


class NotOffered(Exception):
    """The server does not claim the feature under test."""


@dataclass(frozen=True)
class SampleRequest:
    """A request that ``model`` answers.

    ``inputs`` by name, the batch first; ``outputs``: the requested ones. BYTES tensors are arrays of
    objects."""

    model: str
    inputs: Mapping[str, NDArray[Any]]
    outputs: tuple[str, ...]

    def datatype(self, name: str) -> str:
        return str(np_to_triton_dtype(self.inputs[name].dtype))


@dataclass(frozen=True)
class CheckedServer:
    """The server under test: ``host:port`` of its protocols, and requests that it answers.

    Most checks send the first sample. Every request has ``headers``, for example ``x-api-key``. Each
    protocol has TLS settings, or None for plain text. ``binary``: its HTTP accepts tensors in binary form."""

    http: str
    grpc: str
    samples: tuple[SampleRequest, ...]
    headers: Mapping[str, str] = field(default_factory=dict)
    http_tls: Tls | None = None
    grpc_tls: Tls | None = None
    binary: bool = True

    @property
    def sample(self) -> SampleRequest:
        return self.samples[0]


@dataclass(frozen=True)
class ConformanceCheck:
    """One check: ``text`` states the requirement in a sentence, ``body`` tests it.

    ``changes``: it unloads and loads a model."""

    name: str
    protocol: Protocol
    text: str
    body: Callable[[CheckedServer], None]
    changes: bool = False

    def run(self, target: CheckedServer) -> None:
        """Raises Deviation with all findings, NotOffered, or an error of a client."""
        found: list[str] = []
        noted = _NOTED.set(found)
        try:
            self.body(target)
        except Deviation as error:
            found += error.found
        finally:
            _NOTED.reset(noted)
        if found:
            raise Deviation(*found)

    def verdict(self, target: CheckedServer) -> tuple[str, tuple[str, ...]]:
        """``as it should``, ``differs`` or ``not offered``, and the findings.

        An error of a client counts as a difference."""
        try:
            self.run(target)
        except Deviation as deviation:
            return "differs", deviation.found
        except NotOffered as error:
            return "not offered", (str(error),)
        except Exception as error:
            return "differs", (f"{type(error).__name__}: {error}",)
        return "as it should", ()


class CheckSuite:
    """Checks of one protocol, in the order of their definition: functions of the `CheckedServer`.

    With ``connect``, they get a connection as well, which is closed at their end."""

    def __init__(
        self,
        protocol: Protocol,
        connect: Callable[[CheckedServer], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self._protocol, self._connect = protocol, connect
        self.checks: list[ConformanceCheck] = []

    def check(self, run: Check) -> Check:
        """Register a check; the function's docstring is its text."""
        return self._add(run, changes=False)

    def changing(self, run: Check) -> Check:
        """Register a check that changes what is served."""
        return self._add(run, changes=True)

    def _add(self, run: Check, changes: bool) -> Check:
        text = " ".join((run.__doc__ or "").split())
        name = f"{self._protocol}: {run.__name__.replace('_', ' ')}"
        body = run if self._connect is None else partial(_run_connected, run, self._connect)
        self.checks.append(ConformanceCheck(name, self._protocol, text, body, changes))
        return run


def _run_connected(
    run: Check,
    connect: Callable[[CheckedServer], AbstractContextManager[Any]],
    target: CheckedServer,
) -> None:
    with connect(target) as connection:
        run(target, connection)


def note(holds: object, text: str) -> None:
    """Record ``text`` as a deviation unless ``holds``; the check continues."""
    if not holds:
        _NOTED.get().append(text)


def needs(offered: object, what: str) -> None:
    """Raise NotOffered unless ``offered``."""
    if not offered:
        raise NotOffered(what)


def require(holds: object, text: str) -> None:
    """Raise Deviation with ``text`` unless ``holds``."""
    if not holds:
        raise Deviation(text)


def unknown_version(versions: Collection[str]) -> str:
    """A version that is not among a model's ``versions``."""
    return next(str(number) for number in count(77) if str(number) not in versions)


def settled(read: Callable[[], T], wanted: Callable[[T], bool]) -> T:
    """Call ``read`` until its value is ``wanted``, or a timeout; return the last value.

    Servers may count a request after its answer."""
    end = time.monotonic() + _SETTLES_S
    while not wanted(found := read()) and time.monotonic() < end:
        time.sleep(_PAUSE_S)
    return found


def steady(read: Callable[[], T]) -> T:
    """Call ``read`` until it returns the same value twice in a row, or a timeout; return the last value.

    Other clients' requests may change it all the time."""
    end = time.monotonic() + _SETTLES_S
    last = read()
    time.sleep(_PAUSE_S)
    while (found := read()) != last and time.monotonic() < end:
        last = found
        time.sleep(_PAUSE_S)
    return found


def same(
    found: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]], what: str
) -> None:
    """Raise Deviation unless both have the same arrays, to the bit."""
    require(set(found) == set(expected), f"{what}: outputs {list(found)} for {list(expected)}")
    for name, array in expected.items():
        other = found[name]
        require(
            (other.dtype, other.shape) == (array.dtype, array.shape),
            f"{what}: {name!r} is {other.dtype} {other.shape}, was {array.dtype} {array.shape}",
        )
        equal = (
            other.tolist() == array.tolist()
            if array.dtype == np.object_
            else other.tobytes() == array.tobytes()
        )
        require(equal, f"{what}: {name!r} has other values")
