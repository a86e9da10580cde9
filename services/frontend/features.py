"""The categorical features of a request: from named tensors to jagged keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hps.dense.base import DATATYPES
from hps.errors import BadRequest
from hps.lookup.base import Feature
from hps.types import JaggedKeys
from services.frontend.datatypes import INTEGERS, InputRule
from services.frontend.request import InferCall, Tensor

_WEIGHTS = {"FP32": DATATYPES["FP32"]}


class _Wire(NamedTuple):
    """A feature and the names of its tensors."""

    feature: Feature
    offsets: str
    weights: str


class FeatureInputs:
    """The features of a model as tensors: ``f [batch, hotness]``, or ``f [n]`` with ``f.offsets
    [batch + 1]``; ``f.weights`` beside either."""

    def __init__(self, features: Mapping[str, Feature]) -> None:
        self._wires = {
            name: _Wire(feature, f"{name}.offsets", f"{name}.weights")
            for name, feature in features.items()
        }
        self.rules: dict[str, InputRule] = {}
        for name, wire in self._wires.items():
            self.rules[name] = InputRule(INTEGERS, is_keys=True)
            self.rules[wire.offsets] = InputRule(INTEGERS)
            self.rules[wire.weights] = InputRule(_WEIGHTS)

    def gather(self, call: InferCall) -> dict[str, JaggedKeys]:
        """The features among the call's tensors, in the request's order; sets ``call.batch``."""
        tensors, wires = call.tensors, self._wires
        found: dict[str, JaggedKeys] = {}
        batch = 0
        for name, tensor in tensors.items():
            wire = wires.get(name)
            if wire is not None:
                shape = tensor.shape
                if len(shape) == 2 and len(tensors) == 1:
                    keys = JaggedKeys(tensor.flat, shape[0])
                else:
                    keys = _jagged(wire, tensor, tensors)
                found[name] = keys
                if keys.batch > batch:
                    batch = keys.batch
            elif name.endswith((".offsets", ".weights")) and name in self.rules:
                owner = name.rpartition(".")[0]
                if owner not in tensors:
                    raise BadRequest(
                        f"input '{name}' came without '{owner}', the keys it belongs to"
                    )
        call.batch = batch
        return found


def _jagged(wire: _Wire, tensor: Tensor, tensors: dict[str, Tensor]) -> JaggedKeys:
    name, shape = wire.feature.name, tensor.shape
    offsets, weights = tensors.get(wire.offsets), tensors.get(wire.weights)
    flat_weights = None
    if weights is not None:
        flat_weights = weights.flat
        if len(flat_weights) != len(tensor.flat):
            raise BadRequest(
                f"unexpected shape for input '{wire.weights}': {weights.shape}, the keys have {shape}"
            )
    if offsets is not None:
        if len(shape) != 1 or len(offsets.shape) != 1 or not len(offsets.flat):
            raise BadRequest(
                f"jagged keys need '{name}' of shape [n] and '{wire.offsets}' of shape [batch + 1], got "
                f"{shape} and {offsets.shape}"
            )
        return JaggedKeys(tensor.flat, len(offsets.flat) - 1, offsets.flat, flat_weights)
    if len(shape) == 2:
        return JaggedKeys(tensor.flat, shape[0], None, flat_weights)
    hotness = wire.feature.hotness
    if len(shape) == 1 and hotness in (None, 1):
        return JaggedKeys(tensor.flat, shape[0], None, flat_weights)
    raise BadRequest(
        f"unexpected shape for input '{name}': expected [-1,{hotness or -1}] (batch, keys per sample), "
        f"got {shape}"
    )
