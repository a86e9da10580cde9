"""Endpoint of rankings."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from hps.dense.base import DATATYPES
from hps.errors import BadRequest
from hps.node.node import ServedModel
from hps.predict.checks import TOP_K_INDEX
from hps.types import PredictRequest, PredictResult
from services.frontend.datatypes import InputRule
from services.frontend.endpoints import Output, output_aliases, select_outputs, unexpected_output
from services.frontend.features import FeatureInputs
from services.frontend.inference_request import InferenceRequest

Scores = Callable[[PredictRequest], Future[PredictResult]]


class RankingEndpoint:
    """Features and dense inputs in, the network's named outputs out."""

    is_long = True

    def __init__(self, served: ServedModel, scores: Scores | None = None) -> None:
        """``scores`` replaces the model's pipeline."""
        self._prepare_scores = None if scores or not served.pipeline else served.pipeline.prepare
        dense = served.spec.dense
        assert dense is not None
        assert served.pipeline is not None
        self.name = served.name
        self.version = str(served.version)
        self._score = scores or served.pipeline.submit
        self._freshness = served.freshness
        self._sample = served.sample
        self._inputs = FeatureInputs(served.engine.features)
        self._dense = {tensor.name: tensor.shape for tensor in dense.inputs}
        self.rules = dict(self._inputs.rules)
        for tensor in dense.inputs:
            self.rules[tensor.name] = InputRule({tensor.datatype: DATATYPES[tensor.datatype]})
        self._required = [*self._inputs.names, *self._dense]
        self._scores = {tensor.name for tensor in dense.outputs}
        aliases = output_aliases(served.engine.features)
        self._aliases = {name: of for name, of in aliases.items() if name.endswith(".source")}
        self._sources = {f"{name}.source" for name in served.engine.features} | self._aliases.keys()
        self._outputs = self._scores | self._sources | {TOP_K_INDEX}
        self.raw_input = self._required[0] if len(self._required) == 1 else None

    def submit(self, call: InferenceRequest, deadline: float) -> Future[PredictResult]:
        """Start the prediction; see ``Endpoint.submit``."""
        if self._freshness.refusal is not None:
            self._freshness.require()
        # A request to be sampled is needed whole.
        if call.form.prepared_message is not None and call.message and not self._sample.armed:
            submit, call.batch = call.form.prepared_message
            return submit(call.message, call.start, deadline, call.origin)
        request = self._request(call, deadline)
        if call.form.kept and call.message and self._prepare_scores is not None:
            places = {tensor.name: (tensor.offset, tensor.size) for tensor in call.form.raw}
            if (prepared := self._prepare_scores(request, places)) is not None:
                call.form.prepared_message = prepared, call.batch
        return self._score(request)

    def _request(self, call: InferenceRequest, deadline: float) -> PredictRequest:
        """Build the prediction of ``submit``. Raises ``BadRequest``."""
        inputs, shapes = call.inputs, call.form.shapes
        for name in self._required:
            if name not in inputs:
                expected = len(self._required)
                raise BadRequest(
                    f"expected {expected} inputs but got {len(inputs)} inputs for model '{self.name}': "
                    f"missing {', '.join(repr(n) for n in self._required if n not in inputs)}"
                )
        dense = {}
        for name, expected_shape in self._dense.items():
            _check_shape(name, self.name, expected_shape, shapes[name])
            dense[name] = inputs[name].reshape(shapes[name])
        features = self._inputs.gather(call)
        outputs, want_source = None, False
        if call.form.outputs is not None:
            names = call.form.outputs
            outputs = tuple(name for name in names if name in self._scores) or None
            want_source = self._check_outputs(names, call.form.top_k)
        return PredictRequest(
            features, dense, call.form.top_k, deadline, want_source, outputs, call.origin
        )

    def _check_outputs(self, names: tuple[str, ...], top_k: int | None) -> bool:
        """Reject unknown outputs; return True if sources are requested."""
        for name in names:
            if name not in self._outputs:
                raise unexpected_output(name, self.name, self._outputs)
        if TOP_K_INDEX in names and top_k is None:
            raise BadRequest(f"output '{TOP_K_INDEX}' needs the request parameter 'top_k'")
        return not self._sources.isdisjoint(names)

    def outputs(self, call: InferenceRequest, result: PredictResult) -> list[Output]:
        """The network's outputs in the model's order, or the requested ones in the request's."""
        return select_outputs(call, result.outputs, result.sources, self._aliases)


def _check_shape(name: str, model: str, expected: list[int], shape: list[int]) -> None:
    """Check that ``shape`` matches ``expected``; its first dimension is the batch, and -1 is any."""
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
