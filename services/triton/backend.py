"""An instance of Triton's python backend for a model ``<m>.lookup``.

Triton loads ``hps/triton/files/lookup_model.py``. An instance attaches to the node of its machine: it reads
the node's shared CPU cache, and asks the node for misses. The requests of one call are one lookup.

An instance of a model with a network has the version of its folder in Triton's repository, which is that of
the network next to it. Other instances follow the node's current version."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hps
from hps.config import load_config
from hps.config.server_settings import ServerSettings
from hps.dense.base import DATATYPES
from hps.errors import BadRequest, ConfigError, DeadlineExceeded, HpsError, NotFound, Unsupported
from hps.lookup.batching import is_server_error
from hps.lookup.lookup_merge import MergedLookup, check_mergeable, merge_key
from hps.node.served_versions import ServedModel
from hps.suggestions import hint_for
from hps.types import LookupRequest, LookupResult
from services.frontend import request_errors as faults
from services.frontend.endpoints import Output
from services.frontend.errors import client_error, status_of
from services.frontend.hps_keys_format import KEYS
from services.frontend.inference_request import InferenceRequest, RequestTemplate
from services.frontend.lookup_endpoint import LookupEndpoint

log = logging.getLogger(__name__)
_DATATYPE = {dtype: name for name, dtype in DATATYPES.items()}
# HPS's parameters without effect here: accepted values, and the reason for rejecting others.
_NO_REFRESH = "updates reach cached rows as they arrive; there is nothing to refresh"
_WITHOUT_EFFECT = {
    "refresh_interval": ("0", _NO_REFRESH),
    "refresh_delay": ("0", _NO_REFRESH),
    "freeze_sparse": ("false", "the node's `updates` settings determine if rows are updated"),
}
# Triton's names of gRPC's codes. An exceeded deadline is UNAVAILABLE there, as in Triton's queues.
_CODES = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "NOT_FOUND": "NOT_FOUND",
    "UNIMPLEMENTED": "UNSUPPORTED",
    "UNAVAILABLE": "UNAVAILABLE",
    "DEADLINE_EXCEEDED": "UNAVAILABLE",
}
_KNOWN = {"config", "model", "version", *_WITHOUT_EFFECT}


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """A request from Triton: arrays by name, requested outputs (empty: all), timeout in µs (0: none)."""

    inputs: Mapping[str, NDArray[Any]]
    outputs: tuple[str, ...] = ()
    timeout_us: int = 0


@dataclass(frozen=True, slots=True)
class BackendResponse:
    """Outputs in the requested order, and the protocol's response parameters."""

    outputs: list[Output]
    parameters: dict[str, Any]


def triton_error_code(error: HpsError) -> str:
    """Return the name of Triton's code for ``error``, which sets the statuses of HTTP and gRPC."""
    return _CODES.get(status_of(error).grpc, "INTERNAL")


class LookupBackend:
    """One instance: answers one call at a time."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, str],
        version: int = 1,
        device: int = 0,
        float32: Collection[str] = (),
    ) -> None:
        """Attach to the node. Raises ConfigError for an unsupported parameter, and as ``hps.attach``.

        ``name`` of the Triton model, ``<m>.lookup`` or ``<m>``, and its ``version``; ``parameters`` of its
        config.pbtxt: ``config`` names the node's configuration file, ``model`` the model if it is not
        ``<m>``, ``version`` a version or label of the node, or ``current`` to follow it. ``device``: the
        instance's, in Triton's numbering. ``float32``: outputs that are converted to float32."""
        _check_parameters(name, parameters)
        configuration = load_config(parameters["config"])
        self._answering = partial(
            BackendModel,
            name=name,
            limits=configuration.settings.server,
            device=device,
            float32=frozenset(float32),
        )
        self._name, self._model = name, parameters.get("model") or name.removesuffix(".lookup")
        self._now: BackendModel | None = None
        self._served: ServedModel | None = None
        self._models = hps.attach(configuration)
        try:
            current = self._models.model(self._model)
            default = "current" if current.spec.dense is None else str(version)
            self._wanted = parameters.get("version", default)
            self._served = self._find(self._wanted)
        except HpsError:
            self._models.close()
            raise
        self._models.require(self._check)
        self._models.watch(self._renew)
        self._renew()

    def _find(self, wanted: str) -> ServedModel:
        """The version to answer from. Raises NotFound."""
        try:
            return self._models.model(self._model, None if wanted == "current" else wanted)
        except NotFound as error:
            raise NotFound(
                f"{self._name} needs version {wanted} of the node, whose network it feeds: {error}. Load it "
                f"there first (hps model load {self._model} {wanted} --beside)"
            ) from None

    def answer(self, requests: Sequence[BackendRequest]) -> list[BackendResponse | HpsError]:
        """Return an answer or an error for each request."""
        if (now := self._now) is None:
            gone = f"the node no longer serves model '{self._model}'"
            return [NotFound(gone) for _ in requests]
        return now.answer(requests)

    def close(self) -> None:
        self._models.close()

    def _check(self, served: ServedModel) -> None:
        """Reject a version that this instance would follow, but could not answer in its outputs' shapes."""
        follows = self._wanted == "current" and served.name == self._model
        if follows and self._served is not None and _shapes(served) != _shapes(self._served):
            raise Unsupported(
                f"Triton's model {self._name} follows the node, and version {served.version} has other "
                "features or vectors than the exported one; have Triton unload it, and export it again"
            )

    def _renew(self) -> None:
        """Answer from the version wanted, as long as the node serves one of the model.

        A version that the node has replaced is kept until Triton unloads this instance: the network in Triton
        belongs to it. It gets no more updates."""
        models = self._models.models
        if self._model not in models:
            self._now = self._served = None
            return
        try:
            self._served = models.find(
                self._model, None if self._wanted == "current" else self._wanted
            )
        except NotFound:
            log.warning(
                "%s: the node has replaced version %s of model '%s'; its rows get no more updates. Export "
                "the version that the node serves, and load it in Triton",
                self._name,
                self._wanted,
                self._model,
            )
        if self._served is not None:
            self._now = self._answering(self._served)


def _shapes(served: ServedModel) -> dict[str, tuple[Any, ...]]:
    """What the inputs and outputs in config.pbtxt depend on, by feature."""
    return {
        name: (f.table.dim, f.table.dtype, f.pooling, f.hotness)
        for name, f in served.engine.features.items()
    }


def _check_parameters(name: str, parameters: Mapping[str, str]) -> None:
    for parameter, (only, reason) in _WITHOUT_EFFECT.items():
        if parameters.get(parameter, only).lower() != only:
            raise ConfigError(f"parameter {parameter} of {name}: {reason}; leave it out")
    for parameter in parameters.keys() - _KNOWN:
        if not parameter.isupper():  # those of Triton's python backend are in capitals
            hint = hint_for(parameter, sorted(_KNOWN))
            raise ConfigError(f"{name} has an unknown parameter {parameter}{hint}")
    if "config" not in parameters:
        raise ConfigError(
            f"{name} has no parameter config: the node's configuration file, which names server.runtime"
        )


class BackendModel:
    """Answers requests to the model ``served`` under ``name``; see ``LookupBackend``. Not thread-safe."""

    def __init__(
        self,
        served: ServedModel,
        name: str,
        limits: ServerSettings,
        device: int = 0,
        float32: Collection[str] = (),
    ) -> None:
        self._served = served
        self._endpoint = LookupEndpoint(served, name)
        self._timeout_s = limits.request_timeout_ms / 1e3
        self._max_keys = limits.max_keys
        self._device, self._float32 = device, float32

    def answer(self, requests: Sequence[BackendRequest]) -> list[BackendResponse | HpsError]:
        """As ``LookupBackend.answer``. A request whose deadline passes before its lookup gets an error.

        A lookup that requests share has the latest of their deadlines; requests with an earlier one get
        their vectors as well when it is ready."""
        answers: list[BackendResponse | HpsError] = [BadRequest("unanswered")] * len(requests)
        groups: dict[Hashable, list[tuple[int, InferenceRequest, LookupRequest]]] = defaultdict(
            list
        )
        for index, each in enumerate(requests):
            try:
                call = self._call(each)
                request = self._endpoint.request(call, self._deadline(each))
                request = check_mergeable(request, self._served.engine.features)
                groups[merge_key(request) or index].append((index, call, request))
            except HpsError as error:
                answers[index] = error
        for group in groups.values():
            now, in_time = time.monotonic(), []
            for index, call, request in group:
                if request.deadline is not None and request.deadline < now:
                    late = "the deadline passed before the lookup began"
                    answers[index] = DeadlineExceeded(late)
                else:
                    in_time.append((index, call, request))
            if not in_time:
                continue
            lookups = [request for _, _, request in in_time]
            for (index, call, _), found in zip(in_time, self._found(lookups), strict=True):
                if isinstance(found, LookupResult):
                    answers[index] = self._answered(call, found)
                else:
                    answers[index] = found
        return answers

    def _found(self, requests: Sequence[LookupRequest]) -> list[LookupResult | HpsError]:
        """Return vectors or an error for each of some mergeable requests.

        If they fail together, as with too many keys, they are looked up in halves, as in a `Batcher`."""
        try:
            self._served.freshness.require()
            return [*self._lookup(requests)]
        except Exception as error:
            if len(requests) == 1 or is_server_error(error):
                return [client_error(error, "")] * len(requests)
        half = len(requests) // 2
        return self._found(requests[:half]) + self._found(requests[half:])

    def _lookup(self, requests: Sequence[LookupRequest]) -> list[LookupResult]:
        engine = self._served.engine
        if not any(request.features for request in requests):
            return [LookupResult({}) for _ in requests]
        if len(requests) == 1:
            return [engine.lookup(requests[0])]
        merged = MergedLookup(requests, engine.features)
        return merged.split(engine.lookup(merged.request))

    def _call(self, request: BackendRequest) -> InferenceRequest:
        form = RequestTemplate(outputs=request.outputs or None, timeout_us=request.timeout_us)
        flat, keys = {}, 0
        for name, array in request.inputs.items():
            rule = self._endpoint.rules.get(name)
            if rule is None:
                raise faults.unknown_input(name, self._endpoint.name, self._endpoint.rules)
            datatype = _DATATYPE.get(array.dtype, str(array.dtype))
            if datatype not in rule.dtypes:
                raise faults.wrong_type(name, datatype, self._endpoint.name, rule)
            form.shapes[name] = list(array.shape)
            flat[name] = np.ascontiguousarray(array).reshape(-1)
            keys += array.size if rule.is_keys else 0
        if keys > self._max_keys:
            raise faults.too_many_keys(keys, self._max_keys)
        return InferenceRequest(form, flat)

    def _deadline(self, request: BackendRequest) -> float:
        """Return the deadline, counted from now: Triton does not report the time in its queue."""
        return time.monotonic() + (request.timeout_us * 1e-6 or self._timeout_s)

    def _answered(self, call: InferenceRequest, result: LookupResult) -> BackendResponse:
        outputs = self._endpoint.outputs(call, result)
        parameters: dict[str, Any] = {
            "hps_defaulted": result.defaulted,
            "hps_degraded": ",".join(result.degraded),
        }
        freshness = self._served.freshness
        if freshness.stale_s and (stale_s := freshness.flag()):
            parameters["hps_stale_s"] = stale_s
        if KEYS in call.form.shapes and KEYS not in self._served.engine.features:
            parameters |= self._hps_own(len(call.inputs[KEYS]))
        return BackendResponse([(n, self._batched(call, n, a)) for n, a in outputs], parameters)

    def _hps_own(self, keys: int) -> dict[str, int]:
        """Return HPS's response parameters for a request of ``keys`` keys: the samples, if the most keys per
        sample are known, and the device."""
        features = self._served.engine.features.values()
        most = [feature.max_hotness or feature.hotness for feature in features]
        known = sum(m for m in most if m) if all(most) else 0
        samples = {"NumSample": keys // known} if known else {}
        return {**samples, "DeviceID": self._device}

    def _batched(self, call: InferenceRequest, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """Return an output in the shape and dtype of config.pbtxt, by which Triton splits batches.

        HPS's flat ``OUTPUT0`` is a batch of one if its keys were; unpooled rows are grouped by sample if all
        samples have the same number of them."""
        shape = call.form.shapes
        if name in self._float32:
            array = array.astype(np.float32, copy=False)
        if name == "OUTPUT0":
            return array[None] if len(shape.get(KEYS, ())) == 2 else array
        feature = self._served.engine.features.get(name)
        if feature is None or feature.pooling != "none" or feature.hotness is None:
            return array
        return array.reshape(-1, feature.hotness, array.shape[-1])
