"""An inference request as arrays, independent of the protocol."""

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
    """A request without its id and its tensors' elements.

    ``shapes`` of all inputs. ``outputs``: requested names; None: all. ``timeout_us`` 0: the server's
    default.
    ``memory_refs``: tensors in shared memory.

    A ``kept`` template is shared by requests that differ only in their elements. ``prepared`` is then the
    endpoint's prepared form of them, and their batch size."""

    shapes: dict[str, list[int]] = field(default_factory=dict)
    outputs: tuple[str, ...] | None = None
    timeout_us: int = 0
    top_k: int | None = None
    memory_refs: SharedMemoryRefs | None = None
    kept: bool = False
    prepared: tuple[PreparedSubmit, int] | None = None


@dataclass(slots=True)
class InferenceRequest:
    """One request. ``inputs`` has each tensor's elements ``(n,)``; ``form`` has the shapes.

    Inputs are flat and aligned, and may be read-only. ``id`` is the client's name for the request, or
    empty. The endpoint sets ``batch``, the number of samples, for statistics. ``origin``: id and trace,
    None
    if neither is needed. ``targets``: outputs to write into shared memory, and their locations."""

    form: RequestTemplate
    inputs: dict[str, NDArray[Any]]
    id: str = ""
    batch: int = 1
    origin: RequestContext | None = None
    targets: Mapping[str, Target] = field(default_factory=dict)
