"""What a served model takes and gives on the wire: named tensors to requests, results to tensors.

``<m>.lookup`` (and ``<m>`` when the model has no dense part) is a ``LookupEndpoint``, ``<m>`` with a
dense part a ``RankingEndpoint``. They know nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from numpy.typing import NDArray

from hps.errors import BadRequest
from services.frontend.datatypes import InputRule
from services.frontend.request import InferCall
from services.frontend.request_faults import nearest, shown

# An output on its way out: its name, whether it goes out as binary, its values.
Output = tuple[str, bool, NDArray[Any]]


class Endpoint(Protocol):
    """One name under ``/v2/models``. All members may be used by any thread."""

    name: str
    version: str
    raw_input: str | None
    """The only input, for raw requests; None when there are several."""

    @property
    def rules(self) -> Mapping[str, InputRule]:
        """What each input may be, by name."""
        ...

    def submit(self, call: InferCall, deadline: float) -> Future[Any]:
        """Start answering; raises ``BadRequest`` or ``Unavailable`` at once, never waits."""
        ...

    def outputs(self, call: InferCall, result: Any) -> list[Output]:
        """What the request asked for, in its order."""
        ...


def unexpected_output(name: str, model: str, known: set[str]) -> BadRequest:
    """An error for an output the model does not have."""
    return BadRequest(
        f"unexpected inference output {shown(name)} for model '{model}'{nearest(name, known)}"
    )
