"""What a served model takes and gives on the wire: named tensors to requests, results to tensors.

``<m>.lookup`` (and ``<m>`` when the model has no dense part) is a ``LookupEndpoint``, ``<m>`` with a
dense part a ``RankingEndpoint``. They know nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hps.dense.base import DATATYPES
from hps.errors import BadRequest
from hps.node import ServedModel
from hps.pipeline import TOP_K_INDEX
from hps.types import JaggedKeys, LookupRequest, LookupResult, PredictRequest, PredictResult
from hps.workers import Done
from services.frontend.datatypes import INTEGERS
from services.frontend.features import FeatureInputs
from services.frontend.request import InferCall, InputRule, Tensor
from services.frontend.request_faults import nearest, shown

KEYS, NUMKEYS, OUTPUT0 = "KEYS", "NUMKEYS", "OUTPUT0"
KEYS_SOURCE = "KEYS.source"

# An output on its way out: its name, whether it goes out as binary, its values.
Output = tuple[str, bool, NDArray[Any]]


class Result(Protocol):
    """What ``LookupResult`` and ``PredictResult`` have in common."""

    defaulted: int
    degraded: tuple[str, ...]


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


class LookupEndpoint:
    """Embedding lookup in two forms: a tensor per feature, or HPS's ``KEYS`` and ``NUMKEYS``, which
    go by the model's tables in their order and come back as one flat ``OUTPUT0``."""

    def __init__(self, served: ServedModel, name: str) -> None:
        self.name = name
        self.version = str(served.version)
        self._engine = served.engine
        self._inputs = FeatureInputs(served.engine.features)
        self._tables = list(served.engine.tables)
        self.rules = dict(self._inputs.rules)
        self._outputs = {n for f in served.engine.features for n in (f, f"{f}.source")}
        # A feature called KEYS wins: the model's own names come before HPS's.
        self._by_table = not {KEYS, NUMKEYS} & self.rules.keys()
        if self._by_table:
            self.rules[KEYS] = InputRule(INTEGERS, is_keys=True)
            self.rules[NUMKEYS] = InputRule(INTEGERS)
            self._outputs |= {OUTPUT0, KEYS_SOURCE}
        features = list(served.engine.features)
        self.raw_input = features[0] if len(features) == 1 else None

    def submit(self, call: InferCall, deadline: float) -> Future[LookupResult]:
        """Start the lookup; see ``Endpoint.submit``."""
        if call.form.top_k is not None:
            raise BadRequest(f"parameter 'top_k' is for ranking models, '{self.name}' is a lookup")
        want_source = False
        if call.form.outputs is not None:
            for name, _ in call.form.outputs:
                if name not in self._outputs:
                    raise _unexpected_output(name, self.name, self._outputs)
                want_source = want_source or name.endswith(".source")
        tensors = call.tensors
        if self._by_table and (KEYS in tensors or NUMKEYS in tensors):
            features = self._table_keys(tensors)
            if not features:
                return Done(LookupResult({}))
            by_table = True
        else:
            features = self._inputs.gather(call)
            if not features:
                names = ", ".join(f"'{n}'" for n in list(self._inputs.rules)[::3][:8])
                raise BadRequest(
                    f"the request names no feature of model '{self.name}'; send {names}"
                    + (f", or '{KEYS}' and '{NUMKEYS}'" if self._by_table else "")
                )
            by_table = False
        return self._engine.submit(
            LookupRequest(features, deadline, want_source, None, by_table, call.form.id)
        )

    def _table_keys(self, tensors: dict[str, Tensor]) -> dict[str, JaggedKeys]:
        """``KEYS`` cut into each table's share; tables with no keys are left out."""
        if len(tensors) != 2 or KEYS not in tensors or NUMKEYS not in tensors:
            raise BadRequest(
                f"'{KEYS}' and '{NUMKEYS}' go together and with nothing else, got "
                + ", ".join(f"'{name}'" for name in tensors)
            )
        keys, counts = tensors[KEYS], tensors[NUMKEYS].flat.tolist()
        _one_row(KEYS, keys.shape)
        _one_row(NUMKEYS, tensors[NUMKEYS].shape)
        flat = keys.flat
        if len(counts) != len(self._tables):
            raise BadRequest(
                f"'{NUMKEYS}' has {len(counts)} counts, model '{self.name}' has {len(self._tables)} tables: "
                + ", ".join(self._tables)
            )
        if min(counts) < 0 or sum(counts) != len(flat):
            raise BadRequest(
                f"'{NUMKEYS}' counts {shown(counts)} must not be negative and add up to the {len(flat)} "
                f"keys of '{KEYS}'"
            )
        if len(counts) == 1 and counts[0]:
            return {self._tables[0]: JaggedKeys(flat, counts[0])}
        start, found = 0, {}
        for table, count in zip(self._tables, counts, strict=True):
            if count:
                found[table] = JaggedKeys(flat[start : start + count], count)
                start += count
        return found

    def outputs(self, call: InferCall, result: LookupResult) -> list[Output]:
        """Outputs that were asked for; one whose input was not sent is left out."""
        if KEYS in call.tensors and self._by_table:
            return _flat_outputs(call, result)
        if call.form.outputs is None:
            return [(name, call.form.binary, vectors) for name, vectors in result.vectors.items()]
        found: list[Output] = []
        for name, binary in call.form.outputs:
            if name in result.vectors:
                found.append((name, binary, result.vectors[name]))
            elif (feature := name.removesuffix(".source")) in result.sources:
                sources = result.sources[feature]
                found.append((name, binary, sources.reshape(call.tensors[feature].shape)))
        return found


def _one_row(name: str, shape: list[int]) -> None:
    if len(shape) != 1 and not (len(shape) == 2 and shape[0] == 1):
        raise BadRequest(
            f"unexpected shape for input '{name}': expected [1,-1] (one request's worth), got {shape}"
        )


def _flat_outputs(call: InferCall, result: LookupResult) -> list[Output]:
    """``OUTPUT0 (Σ keys * dim,)`` float32, table after table, and the source of every key."""
    found: list[Output] = []
    for name, binary in call.form.outputs or [(OUTPUT0, call.form.binary)]:
        if name == OUTPUT0:
            found.append((name, binary, _joined([*result.vectors.values()], np.dtype(np.float32))))
        elif name == KEYS_SOURCE:
            sources = [result.sources[table] for table in result.vectors]
            codes = _joined(sources, np.dtype(np.uint8))
            found.append((name, binary, codes.reshape(call.tensors[KEYS].shape)))
    return found


def _joined(arrays: list[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(arrays) == 1:
        return arrays[0].reshape(-1).astype(dtype, copy=False)
    if not arrays:
        return np.empty(0, dtype)
    joined: NDArray[Any] = np.concatenate([a.reshape(-1) for a in arrays]).astype(dtype, copy=False)
    return joined


class RankingEndpoint:
    """Features and dense inputs in, the network's named outputs out."""

    def __init__(self, served: ServedModel) -> None:
        dense = served.spec.dense
        assert dense is not None
        assert served.pipeline is not None
        self.name = served.name
        self.version = str(served.version)
        self._pipeline = served.pipeline
        self._inputs = FeatureInputs(served.engine.features)
        self._dense = {tensor.name: tensor.shape for tensor in dense.inputs}
        self.rules = dict(self._inputs.rules)
        for tensor in dense.inputs:
            self.rules[tensor.name] = InputRule({tensor.datatype: DATATYPES[tensor.datatype]})
        self._required = [*served.engine.features, *self._dense]
        self._scores = {tensor.name for tensor in dense.outputs}
        self._sources = {f"{name}.source" for name in served.engine.features}
        self._outputs = self._scores | self._sources | {TOP_K_INDEX}
        self.raw_input = self._required[0] if len(self._required) == 1 else None

    def submit(self, call: InferCall, deadline: float) -> Future[PredictResult]:
        """Start the prediction; see ``Endpoint.submit``."""
        tensors = call.tensors
        for name in self._required:
            if name not in tensors:
                expected = len(self._required)
                raise BadRequest(
                    f"expected {expected} inputs but got {len(tensors)} inputs for model '{self.name}': "
                    f"missing {', '.join(repr(n) for n in self._required if n not in tensors)}"
                )
        dense = {}
        for name, expected_shape in self._dense.items():
            tensor = tensors[name]
            _check_shape(name, self.name, expected_shape, tensor.shape)
            dense[name] = tensor.flat.reshape(tensor.shape)
        features = self._inputs.gather(call)
        outputs, want_source = None, False
        if call.form.outputs is not None:
            names = [name for name, _ in call.form.outputs]
            outputs = tuple(name for name in names if name in self._scores) or None
            want_source = self._check_outputs(names, call.form.top_k)
        return self._pipeline.submit(
            PredictRequest(
                features, dense, call.form.top_k, deadline, want_source, outputs, call.form.id
            )
        )

    def _check_outputs(self, names: list[str], top_k: int | None) -> bool:
        """Refuse unknown outputs; whether sources were asked for."""
        for name in names:
            if name not in self._outputs:
                raise _unexpected_output(name, self.name, self._outputs)
        if TOP_K_INDEX in names and top_k is None:
            raise BadRequest(f"output '{TOP_K_INDEX}' needs the request parameter 'top_k'")
        return not self._sources.isdisjoint(names)

    def outputs(self, call: InferCall, result: PredictResult) -> list[Output]:
        """The network's outputs in the model's order, or what was asked for in the request's."""
        if call.form.outputs is None:
            return [(name, call.form.binary, values) for name, values in result.outputs.items()]
        found: list[Output] = []
        for name, binary in call.form.outputs:
            if name in result.outputs:
                found.append((name, binary, result.outputs[name]))
            else:
                feature = name.removesuffix(".source")
                sources = result.sources[feature]
                found.append((name, binary, sources.reshape(call.tensors[feature].shape)))
        return found


def _check_shape(name: str, model: str, expected: list[int], shape: list[int]) -> None:
    """``shape`` fits ``expected``, whose first dimension is the batch and where -1 is anything."""
    if len(shape) == len(expected):
        for wanted, got in zip(expected[1:], shape[1:], strict=True):
            if wanted not in (-1, got):
                break
        else:
            return
    raise BadRequest(
        f"unexpected shape for input '{name}' for model '{model}'. Expected {[-1, *expected[1:]]}, got "
        f"{shape}"
    )


def _unexpected_output(name: Any, model: str, known: set[str]) -> BadRequest:
    return BadRequest(
        f"unexpected inference output {shown(name)} for model '{model}'{nearest(str(name), known)}"
    )
