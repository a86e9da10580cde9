"""Convert a request's named tensors to jagged keys per feature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hps.dense.base import DATATYPES
from hps.errors import BadRequest
from hps.lookup.base import Feature, features_by_input
from hps.types import JaggedKeys
from services.frontend.datatypes import INTEGERS, InputRule
from services.frontend.inference_request import InferenceRequest

_WEIGHTS = {"FP32": DATATYPES["FP32"]}


class _KeyTensors(NamedTuple):
    """The keys of a request, the names of their tensors, and the features that use them."""

    name: str
    features: tuple[Feature, ...]
    offsets: str
    weights: str


class FeatureInputs:
    """Converts the tensors of a model's features to keys.

    ``f [batch, hotness]``, or ``f [n]`` with ``f.offsets [batch + 1]``; either with ``f.weights``. Keys of
    several tables are sent once."""

    def __init__(self, features: Mapping[str, Feature]) -> None:
        self._wires = {
            name: _KeyTensors(name, tuple(takers), f"{name}.offsets", f"{name}.weights")
            for name, takers in features_by_input(features).items()
        }
        self.names = tuple(self._wires)
        """The request's names for keys."""
        self.only = self.names[0] if len(self.names) == 1 else None
        self.rules: dict[str, InputRule] = {}
        for name, wire in self._wires.items():
            self.rules[name] = InputRule(INTEGERS, is_keys=True)
            self.rules[wire.offsets] = InputRule(INTEGERS)
            self.rules[wire.weights] = InputRule(_WEIGHTS)

    def gather(self, call: InferenceRequest) -> dict[str, JaggedKeys]:
        """The features in the call's inputs, in the request's order; sets ``call.batch``."""
        found: dict[str, JaggedKeys] = {}
        batch = 0
        for name in call.inputs:
            wire = self._wires.get(name)
            if wire is not None:
                keys = _jagged(wire, call)
                for feature in wire.features:
                    found[feature.name] = keys
                batch = max(batch, keys.batch)
            elif name.endswith((".offsets", ".weights")) and name in self.rules:
                owner = name.rpartition(".")[0]
                if owner not in call.inputs:
                    raise BadRequest(f"input '{name}' is given without '{owner}', its keys")
        call.batch = batch
        return found


def _jagged(wire: _KeyTensors, call: InferenceRequest) -> JaggedKeys:
    name, inputs, shapes = wire.name, call.inputs, call.form.shapes
    keys, shape = inputs[name], shapes[name]
    offsets, weights = inputs.get(wire.offsets), inputs.get(wire.weights)
    if weights is not None and len(weights) != len(keys):
        raise BadRequest(
            f"unexpected shape for input '{wire.weights}': {shapes[wire.weights]}, the keys have {shape}"
        )
    if offsets is not None:
        if len(shape) != 1 or len(shapes[wire.offsets]) != 1 or not len(offsets):
            raise BadRequest(
                f"jagged keys need '{name}' of shape [n] and '{wire.offsets}' of shape [batch + 1], got "
                f"{shape} and {shapes[wire.offsets]}"
            )
        return JaggedKeys(keys, len(offsets) - 1, offsets, weights)
    hotness = wire.features[0].hotness
    if len(shape) == 2 or (len(shape) == 1 and hotness in (None, 1)):
        return JaggedKeys(keys, shape[0], None, weights)
    raise BadRequest(
        f"unexpected shape for input '{name}': expected [-1,{hotness or -1}] (batch, keys per sample), "
        f"got {shape}"
    )
