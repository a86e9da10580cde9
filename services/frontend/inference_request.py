"""An inference request for an endpoint, in arrays, independent of the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from hps.lookup.base import PreparedSubmit
from hps.tracing import RequestContext
from services.frontend.shared_memory_refs import SharedMemoryRefs, Target


@dataclass(slots=True)
class RequestTemplate:
    """All of a request but its id and its tensors' elements. ``shapes`` has every input's; ``outputs`` are
    the names that were asked for, None for all there are; ``timeout_us`` 0 is the server's default.

    A form that is ``kept`` stands for requests that differ in their elements alone: ``prepared`` is then
    how the endpoint begins them, and their batch.
    """

    shapes: dict[str, list[int]] = field(default_factory=dict)
    outputs: tuple[str, ...] | None = None
    timeout_us: int = 0
    top_k: int | None = None
    elsewhere: SharedMemoryRefs | None = None
    kept: bool = False
    prepared: tuple[PreparedSubmit, int] | None = None


@dataclass(slots=True)
class InferenceRequest:
    """A request. ``inputs`` are the elements of each, ``(n,)``, flat and aligned, and may be read-only; the
    form has their shapes. ``id`` is the client's name for the request, or empty. ``batch`` is filled in by
    the endpoint: samples, for statistics. ``origin`` is on whose behalf it is, where anybody cares.
    ``targets``: the outputs that are wanted in shared memory, and where."""

    form: RequestTemplate
    inputs: dict[str, NDArray[Any]]
    id: str = ""
    batch: int = 1
    origin: RequestContext | None = None
    targets: Mapping[str, Target] = field(default_factory=dict)
