"""Endpoint of embedding lookups."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import BadRequest
from hps.lookup.base import Lookup, PreparedSubmit
from hps.node.node import ServedModel
from hps.threads import CompletedFuture
from hps.tracing import RequestContext
from hps.types import JaggedKeys, KeyArray, LookupRequest, LookupResult
from services.frontend.datatypes import INTEGERS, InputRule
from services.frontend.endpoints import (
    Output,
    named_outputs,
    output_aliases,
    select_outputs,
    unexpected_output,
)
from services.frontend.errors import short_value
from services.frontend.features import FeatureInputs
from services.frontend.hps_keys_format import KEYS, KEYS_SOURCE, NUMKEYS, OUTPUT0, HpsKeysFormat
from services.frontend.inference_request import InferenceRequest
from services.frontend.sequence_outputs import SequenceOutputs


class LookupEndpoint:
    """Embedding lookup in two formats: a tensor per feature, or HPS's ``KEYS`` and ``NUMKEYS``.

    HPS's format has the order of the model's tables (`HpsKeysFormat`) and one flat ``OUTPUT0``."""

    is_long = False

    def __init__(self, served: ServedModel, name: str, engine: Lookup | None = None) -> None:
        """``engine`` replaces the model's lookup."""
        self.name = name
        self.version = str(served.version)
        self._engine = engine or served.engine
        self._freshness = served.freshness
        self._inputs = FeatureInputs(served.engine.features)
        self._keys_form = HpsKeysFormat(served.engine)
        self.rules = dict(self._inputs.rules)
        self._aliases = output_aliases(served.engine.features)
        self._outputs = {n for f in served.engine.features for n in (f, f"{f}.source")}
        self._outputs |= self._aliases.keys()
        self._sequences = SequenceOutputs(served.engine.model)
        self._outputs.update(self._sequences.names)
        # A feature named KEYS wins: the model's names precede HPS's.
        self._by_table = not {KEYS, NUMKEYS} & self.rules.keys()
        if self._by_table:
            self.rules[KEYS] = InputRule(INTEGERS, is_keys=True)
            self.rules[NUMKEYS] = InputRule(INTEGERS)
            self._outputs |= {OUTPUT0, KEYS_SOURCE}
        self.raw_input = self._inputs.only

    def submit(self, call: InferenceRequest, deadline: float) -> Future[LookupResult]:
        """Start the lookup; see ``Endpoint.submit``. Calls with a known template are not checked again."""
        form = call.form
        if self._freshness.refusal is not None:
            self._freshness.require()
        if form.prepared is not None and (call.origin is None or not call.origin.is_recorded):
            submit, call.batch = form.prepared
            return submit([*call.inputs.values()], deadline, call.origin)
        request = self.request(call, deadline)
        if not request.features:
            return CompletedFuture(LookupResult({}))
        # In HPS's format, the numbers of keys are data, not shapes; so are offsets and weights.
        if form.kept and not request.by_table:
            self._prepare(call, request)
        return self._engine.submit(request)

    def _prepare(self, call: InferenceRequest, request: LookupRequest) -> None:
        """Prepare the lookup for further calls of this template, if all of its inputs are keys."""
        features = self._engine.features
        taken = [features[name].input for name in request.features]
        if {*taken} != call.inputs.keys():
            return
        prepared = self._engine.prepare(replace(request, origin=None))
        if len(taken) > len(call.inputs):
            prepared = partial(_spread, prepared, [[*call.inputs].index(name) for name in taken])
        call.form.prepared = prepared, call.batch

    def request(self, call: InferenceRequest, deadline: float) -> LookupRequest:
        """Build the lookup of ``submit``. Raises ``BadRequest``."""
        form = call.form
        if form.top_k is not None:
            raise BadRequest(f"parameter 'top_k' is for ranking models, '{self.name}' is a lookup")
        want_source = False
        for name in form.outputs or ():
            if name not in self._outputs:
                raise unexpected_output(name, self.name, self._outputs)
            want_source = want_source or name.endswith(".source")
        by_table = self._by_table and (KEYS in form.shapes or NUMKEYS in form.shapes)
        if by_table:
            features = self._table_keys(call)
        else:
            features = self._inputs.gather(call)
            if not features:
                raise self._nothing_asked()
            if names := self._sequence_names(call):
                self._sequences.check(names, features)
        return LookupRequest(features, deadline, want_source, None, by_table, call.origin)

    def _nothing_asked(self) -> BadRequest:
        names = ", ".join(f"'{n}'" for n in list(self._inputs.rules)[::3][:8])
        return BadRequest(
            f"the request names no feature of model '{self.name}'; send {names}"
            + (f", or '{KEYS}' and '{NUMKEYS}'" if self._by_table else "")
        )

    def _table_keys(self, call: InferenceRequest) -> dict[str, JaggedKeys]:
        """Split ``KEYS`` by table; tables without keys are left out."""
        shapes = call.form.shapes
        if shapes.keys() != {KEYS, NUMKEYS}:
            raise BadRequest(
                f"'{KEYS}' and '{NUMKEYS}' go together and with nothing else, got "
                + ", ".join(f"'{name}'" for name in call.inputs)
            )
        _one_row(KEYS, shapes[KEYS])
        _one_row(NUMKEYS, shapes[NUMKEYS])
        flat, counts = call.inputs[KEYS], call.inputs[NUMKEYS].tolist()
        names = self._keys_form.names
        if len(counts) != len(names):
            raise BadRequest(
                f"'{NUMKEYS}' has {len(counts)} counts, model '{self.name}' has {len(names)} tables: "
                + ", ".join(names)
            )
        if min(counts) < 0 or sum(counts) != len(flat):
            raise BadRequest(
                f"'{NUMKEYS}' counts {short_value(counts)} must not be negative and "
                f"add up to the {len(flat)} "
                f"keys of '{KEYS}'"
            )
        return self._keys_form.split(flat, counts)

    def outputs(self, call: InferenceRequest, result: LookupResult) -> list[Output]:
        """The requested outputs; those whose input is missing are left out."""
        if KEYS in call.form.shapes and self._by_table:
            return self._flat_outputs(call, result)
        vectors = result.vectors
        if names := self._sequence_names(call):
            keys = self._inputs.gather(call)
            vectors = {**vectors, **self._sequences.make(names, keys, vectors)}
        return select_outputs(call, vectors, result.sources, self._aliases)

    def _sequence_names(self, call: InferenceRequest) -> list[str]:
        """The requested outputs that `SequenceOutputs` makes."""
        return self._sequences.among(named_outputs(call.form.outputs or (), self._aliases))

    def _flat_outputs(self, call: InferenceRequest, result: LookupResult) -> list[Output]:
        """``OUTPUT0 (Σ keys * dim,)`` float32, table after table, and the source of every key."""
        form, counts = self._keys_form, call.inputs[NUMKEYS]
        found: list[Output] = []
        for name in call.form.outputs or (OUTPUT0,):
            if name == OUTPUT0:
                vectors = form.join(result.vectors, counts)
                found.append((name, _joined(vectors, np.dtype(np.float32))))
            elif name == KEYS_SOURCE:
                sources = {table: result.sources[table] for table in result.vectors}
                codes = _joined(form.join(sources, counts), np.dtype(np.uint8))
                found.append((name, codes.reshape(call.form.shapes[KEYS])))
        return found


def _spread(
    prepared: PreparedSubmit,
    order: Sequence[int],
    keys: Sequence[KeyArray],
    deadline: float | None,
    origin: RequestContext | None = None,
) -> Future[LookupResult]:
    """Call ``prepared`` with the call's ``keys``; ``order`` repeats those that serve several tables."""
    return prepared([keys[i] for i in order], deadline, origin)


def _one_row(name: str, shape: list[int]) -> None:
    if len(shape) != 1 and not (len(shape) == 2 and shape[0] == 1):
        raise BadRequest(
            f"unexpected shape for input '{name}': expected [1,-1] (one request's worth), got {shape}"
        )


def _joined(arrays: list[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(arrays) == 1:
        return arrays[0].reshape(-1).astype(dtype, copy=False)
    if not arrays:
        return np.empty(0, dtype)
    joined: NDArray[Any] = np.concatenate([a.reshape(-1) for a in arrays]).astype(dtype, copy=False)
    return joined
