"""Endpoints of a served model: named tensors to requests, results to tensors.

``<m>.lookup`` (and ``<m>`` of a model without a network) is a ``LookupEndpoint``, ``<m>`` with a
network a ``RankingEndpoint``. They are independent of HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from numpy.typing import NDArray

from hps.errors import BadRequest
from hps.lookup.base import Feature, features_by_input
from hps.suggestions import hint_for
from services.frontend.datatypes import InputRule
from services.frontend.errors import short_value
from services.frontend.inference_request import InferenceRequest

# An output of an answer: its name and its values.
Output = tuple[str, NDArray[Any]]


class Endpoint(Protocol):
    """One name under ``/v2/models``. Thread-safe."""

    name: str
    version: str
    raw_input: str | None
    """The only input, for raw requests; None when there are several."""
    is_long: bool
    """True if no request is answered within `submit`."""

    @property
    def rules(self) -> Mapping[str, InputRule]:
        """Rules of the inputs, by name."""
        ...

    def submit(self, call: InferenceRequest, deadline: float) -> Future[Any]:
        """Start answering; never waits. Raises ``BadRequest`` or ``Unavailable`` immediately."""
        ...

    def outputs(self, call: InferenceRequest, result: Any) -> list[Output]:
        """The requested outputs, in the request's order."""
        ...


def output_aliases(features: Mapping[str, Feature]) -> dict[str, list[str]]:
    """Output names that stand for several outputs.

    For keys of several tables, one name selects the vectors of all tables, another all sources, another all
    padded vectors."""
    shared = {
        name: takers for name, takers in features_by_input(features).items() if len(takers) > 1
    }
    return {
        f"{name}{suffix}": [f"{feature.name}{suffix}" for feature in takers]
        for name, takers in shared.items()
        for suffix in ("", ".source", ".padded")
        if suffix != ".padded" or takers[0].max_length is not None
    }


def select_outputs(
    call: InferenceRequest,
    values: Mapping[str, NDArray[Any]],
    sources: Mapping[str, NDArray[Any]],
    aliases: Mapping[str, Sequence[str]],
) -> list[Output]:
    """Select the requested ``values`` and, as ``f.source``, ``sources``, in the request's order.

    Without names, all values. Unknown names are skipped. ``aliases``: see `output_aliases`."""
    if call.form.outputs is None:
        return list(values.items())
    found: list[Output] = []
    for name in named_outputs(call.form.outputs, aliases):
        if name in values:
            found.append((name, values[name]))
        elif (feature := name.removesuffix(".source")) in sources:
            shape = call.form.shapes[feature.partition(".")[0]]  # the shape of its keys
            found.append((name, sources[feature].reshape(shape)))
    return found


def named_outputs(outputs: Sequence[str], aliases: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """Return ``outputs`` with those that ``aliases`` names stand for; see `output_aliases`."""
    if not aliases or aliases.keys().isdisjoint(outputs):
        return outputs
    return list(dict.fromkeys(each for name in outputs for each in aliases.get(name, (name,))))


def unexpected_output(name: str, model: str, known: set[str]) -> BadRequest:
    """Error for an output that the model does not have."""
    return BadRequest(
        f"unexpected inference output {short_value(name)} for model '{model}'{hint_for(name, sorted(known))}"
    )
