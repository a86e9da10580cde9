"""What a served model takes and gives on the wire: named tensors to requests, results to tensors.

``<m>.lookup`` (and ``<m>`` when the model has no dense part) is a ``LookupEndpoint``, ``<m>`` with a
dense part a ``RankingEndpoint``. They know nothing of HTTP or gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from numpy.typing import NDArray

from hps.errors import BadRequest
from hps.names import hint_for
from services.frontend.call import Call
from services.frontend.datatypes import InputRule
from services.frontend.errors import shown

# An output on its way out: its name and its values.
Output = tuple[str, NDArray[Any]]


class Endpoint(Protocol):
    """One name under ``/v2/models``. All members may be used by any thread."""

    name: str
    version: str
    raw_input: str | None
    """The only input, for raw requests; None when there are several."""
    is_long: bool
    """Whether no request is answered while it is submitted."""

    @property
    def rules(self) -> Mapping[str, InputRule]:
        """What each input may be, by name."""
        ...

    def submit(self, call: Call, deadline: float) -> Future[Any]:
        """Start answering; raises ``BadRequest`` or ``Unavailable`` at once, never waits."""
        ...

    def outputs(self, call: Call, result: Any) -> list[Output]:
        """What the request asked for, in its order."""
        ...


def asked_for(
    call: Call, values: Mapping[str, NDArray[Any]], sources: Mapping[str, NDArray[Any]]
) -> list[Output]:
    """The ``values`` and, as ``f.source``, the ``sources`` that the request names, in its order; all values
    where it names none. What is in neither is left out."""
    if call.form.outputs is None:
        return list(values.items())
    found: list[Output] = []
    for name in call.form.outputs:
        if name in values:
            found.append((name, values[name]))
        elif (feature := name.removesuffix(".source")) in sources:
            found.append((name, sources[feature].reshape(call.form.shapes[feature])))
    return found


def unexpected_output(name: str, model: str, known: set[str]) -> BadRequest:
    """An error for an output the model does not have."""
    return BadRequest(
        f"unexpected inference output {shown(name)} for model '{model}'{hint_for(name, sorted(known))}"
    )
