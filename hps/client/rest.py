"""The REST client: inference through ``tritonclient``, the admin interface as JSON."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hps.errors import (
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    Forbidden,
    HpsError,
    NotFound,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from hps.types import JaggedKeys, LookupResult, PredictResult, as_keys

Keys = JaggedKeys | ArrayLike
"""Keys of one feature: ``(batch,)`` or ``(batch, hotness)`` integers, or jagged."""

_ERRORS: dict[int, type[HpsError]] = {
    400: BadRequest,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    405: Unsupported,
    413: BadRequest,
    501: Unsupported,
    503: Unavailable,
    504: DeadlineExceeded,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model answered: named arrays, in the server's order, and the response's parameters."""

    outputs: dict[str, NDArray[Any]]
    parameters: dict[str, Any] = field(default_factory=dict)
    model_version: str = ""

    @property
    def defaulted(self) -> int:
        """How many keys were unknown and answered with the table's default."""
        return int(self.parameters.get("hps_defaulted", 0))

    @property
    def degraded(self) -> tuple[str, ...]:
        """Tiers that were skipped as broken or late."""
        named = str(self.parameters.get("hps_degraded") or "")
        return tuple(part.strip() for part in named.split(",") if part.strip())


class Sample(NamedTuple):
    """One number of the server's metrics."""

    name: str
    labels: dict[str, str]
    value: float


class Client:
    """Speaks to one server. Not thread-safe: one client per thread.

    ``url`` is the address for requests, ``admin_url`` the one for status and tables; the server
    prints both when it starts. Every failure is an ``HpsError``: ``Unavailable`` when nobody
    answers, else the class that fits the server's reply.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        admin_url: str = "http://127.0.0.1:8002",
        api_key: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self.url = _checked(url)
        self.admin_url = _checked(admin_url)
        self.timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._triton: Any = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; idempotent."""
        if self._triton is not None:
            self._triton.close()
            self._triton = None

    def connect(self) -> None:
        """Load what requests need, so that the first one takes no longer than the others."""
        self._connected()

    def predict(
        self,
        model: str,
        features: Mapping[str, Keys],
        dense: Mapping[str, ArrayLike] | None = None,
        *,
        top_k: int | None = None,
    ) -> PredictResult:
        """Score a batch: keys per feature and the named dense tensors in, named outputs out."""
        inputs = _wire(features)
        datatypes = self._datatypes(model) if dense else {}
        for name, value in (dense or {}).items():
            inputs[name] = np.ascontiguousarray(value, datatypes.get(name))
        answer = self.infer(model, inputs, parameters={"top_k": top_k} if top_k else None)
        return PredictResult(answer.outputs, defaulted=answer.defaulted, degraded=answer.degraded)

    def lookup(
        self, model: str, features: Mapping[str, Keys], *, want_source: bool = False
    ) -> LookupResult:
        """Pooled vectors per feature; ``want_source`` adds the tier's code of every key."""
        names = list(features)
        wanted = names + [f"{name}.source" for name in names if want_source]
        answer = self.infer(f"{model}.lookup", _wire(features), outputs=wanted)
        return LookupResult(
            {name: answer.outputs[name] for name in names},
            {name: answer.outputs[f"{name}.source"] for name in names if want_source},
            defaulted=answer.defaulted,
            degraded=answer.degraded,
        )

    def infer(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        *,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> Answer:
        """One request of the Open Inference Protocol with binary tensors, as they are."""
        from tritonclient.http import InferInput, InferRequestedOutput
        from tritonclient.utils import InferenceServerException, np_to_triton_dtype

        tensors = []
        for name, value in inputs.items():
            tensor = InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
            tensors.append(tensor.set_data_from_numpy(value))
        wanted = None if outputs is None else [InferRequestedOutput(name) for name in outputs]
        try:
            result = self._connected().infer(
                model,
                tensors,
                outputs=wanted,
                parameters=parameters,
                headers=dict(self._headers),  # tritonclient adds to the mapping it is given
            )
        except InferenceServerException as error:
            raise _error(error.status(), error.message()) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(self.url, error) from None
        reply = result.get_response()
        arrays = {out["name"]: result.as_numpy(out["name"]) for out in reply.get("outputs", [])}
        return Answer(arrays, reply.get("parameters") or {}, reply.get("model_version", ""))

    def metadata(self, model: str) -> dict[str, Any]:
        """A model's inputs and outputs, as the protocol describes them."""
        reply = self._json(self.url, "GET", f"/v2/models/{quote(model, safe='')}")
        return dict(reply)

    def config(self, model: str) -> dict[str, Any]:
        """A model's configuration in Triton's form, ``max_batch_size`` for one."""
        return dict(self._json(self.url, "GET", f"/v2/models/{quote(model, safe='')}/config"))

    def is_hps(self) -> bool:
        """Whether the server at ``url`` is one of ours, by the name it gives itself."""
        return str(self._json(self.url, "GET", "/v2").get("name", "")).startswith("hps")

    def ready(self) -> bool:
        """Whether the server answers requests by now; ``Unavailable`` when nobody is there."""
        try:
            self._json(self.url, "GET", "/v2/health/ready")
        except Unavailable as error:
            if isinstance(error, Unreachable):
                raise
            return False
        return True

    def infer_json(self, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One request of the protocol as JSON, and its answer, both as they are."""
        path = f"/v2/models/{quote(model, safe='')}/infer"
        return dict(self._json(self.url, "POST", path, body))

    def admin(self, path: str, body: Any = None) -> Any:
        """An admin call: GET ``path``, or POST of ``body`` as JSON. Returns the parsed reply."""
        try:
            return self._json(self.admin_url, "GET" if body is None else "POST", path, body)
        except NotFound as error:
            if not str(error).startswith("Not Found"):  # the server's word for an unknown path
                raise
            raise NotFound(
                f"{self.admin_url} has no {path.partition('?')[0]}; is it the admin address? The "
                "server prints it when it starts, port 8002 unless configured otherwise"
            ) from None

    def status(self) -> dict[str, Any]:
        """What the server serves and how it is doing."""
        return dict(self.admin("/v1/status"))

    def metrics(self) -> list[Sample]:
        """The server's metrics: name, labels, value."""
        text = self._fetch(self.admin_url, "GET", "/metrics").decode()
        return [sample for line in text.splitlines() if (sample := _sample(line)) is not None]

    def _datatypes(self, model: str) -> dict[str, Any]:
        from tritonclient.utils import triton_to_np_dtype

        tensors = self.metadata(model)["inputs"]
        return {t["name"]: triton_to_np_dtype(t["datatype"]) for t in tensors}

    def _connected(self) -> Any:
        from tritonclient.http import InferenceServerClient

        if self._triton is None:
            parts = urlsplit(self.url)
            self._triton = InferenceServerClient(
                parts.netloc + parts.path,
                ssl=parts.scheme == "https",
                connection_timeout=self.timeout_s,
                network_timeout=self.timeout_s,
            )
        return self._triton

    def _json(self, base: str, verb: str, path: str, body: Any = None) -> Any:
        text = self._fetch(base, verb, path, None if body is None else json.dumps(body))
        try:
            return json.loads(text) if text else {}
        except ValueError:
            raise HpsError(f"{base}{path} did not answer with JSON; is it an hps server?") from None

    def _fetch(self, base: str, verb: str, path: str, body: str | None = None) -> bytes:
        parts = urlsplit(base)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        connection = kind(parts.netloc, timeout=self.timeout_s)
        headers = self._headers | ({"Content-Type": "application/json"} if body else {})
        try:
            connection.request(verb, parts.path + path, body, headers)
            reply = connection.getresponse()
            text = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(base, error) from None
        finally:
            connection.close()
        if reply.status != 200:
            raise _error(str(reply.status), _said(text) or f"{base}{path} answered {reply.status}")
        return text

    def _unreachable(self, base: str, error: Exception) -> Unreachable:
        if isinstance(error, ConnectionRefusedError):
            return Unreachable(
                f"nothing listens at {base}; start a server (hps serve --config FILE) or give the "
                "address that it printed when it started"
            )
        if isinstance(error, TimeoutError):
            return Unreachable(
                f"{base} did not answer within {self.timeout_s:g} s; is it overloaded or stopped?"
            )
        return Unreachable(f"{base} cannot be reached: {error}")


class Unreachable(Unavailable):
    """Nobody answered at the address."""


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"server address {url!r} must look like http://host:port")
    return url.rstrip("/")


def _error(status: str | None, message: str | None) -> HpsError:
    kind = _ERRORS.get(int(status), HpsError) if status and status.isdigit() else HpsError
    return kind(message or f"the server answered {status}")


def _said(text: bytes) -> str:
    """The message of an error reply, or nothing when it has another form."""
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return ""


def _sample(line: str) -> Sample | None:
    """One line of the Prometheus text format."""
    found = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", line)
    if found is None:
        return None
    labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', found[2] or ""))
    return Sample(found[1], labels, float(found[3]))


def _wire(features: Mapping[str, Keys]) -> dict[str, NDArray[Any]]:
    """Features as tensors: ``f [batch, hotness]``; jagged: ``f [n]``, ``f.offsets``, ``f.weights``."""
    tensors: dict[str, NDArray[Any]] = {}
    for name, keys in features.items():
        if not isinstance(keys, JaggedKeys):
            try:
                keys = JaggedKeys.dense(np.asarray(keys))
            except (TypeError, ValueError) as error:
                raise BadRequest(f"feature {name!r}: {error}") from None
        tensors |= _tensors(name, keys)
    return tensors


def _tensors(name: str, keys: JaggedKeys) -> dict[str, NDArray[Any]]:
    if keys.offsets is None:
        tensors = {name: as_keys(keys.keys).reshape(keys.batch, -1 if keys.batch else 0)}
    else:
        tensors = {name: as_keys(keys.keys), f"{name}.offsets": np.asarray(keys.offsets, np.int64)}
    if keys.weights is not None:
        tensors[f"{name}.weights"] = np.asarray(keys.weights, np.float32)
    return tensors
