"""The REST client: inference through ``tritonclient``, the admin interface as JSON."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from hps.client.calls import Call, Calls
from hps.client.errors import Unreachable, replied, unreachable
from hps.client.json_http import JsonHttp
from hps.client.wire import Answer, Sample, parse_sample
from hps.errors import NotFound, Unavailable


class Client(Calls):
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
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._data = JsonHttp(url, self._headers, timeout_s)
        self._admin = JsonHttp(admin_url, self._headers, timeout_s)
        self.url, self.admin_url = self._data.url, self._admin.url
        self.timeout_s = timeout_s
        self._triton: Any = None
        self._types: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; idempotent."""
        if self._triton is not None:
            self._triton.close()
            self._triton = None

    def connect(self) -> None:
        """Load what requests need and connect, so that the first one takes no longer than the others.

        Raises ``Unavailable`` when nobody is there.
        """
        try:
            self._connected().is_server_live()
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(self.url, error, self.timeout_s) from None

    def _ask(self, call: Call) -> Answer:
        from tritonclient.http import InferInput, InferRequestedOutput
        from tritonclient.utils import InferenceServerException, np_to_triton_dtype

        tensors = []
        for name, value in call.inputs.items():
            tensor = InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
            tensors.append(tensor.set_data_from_numpy(value))
        named = call.outputs
        wanted = None if named is None else [InferRequestedOutput(name) for name in named]
        try:
            result = self._connected().infer(
                call.model,
                tensors,
                outputs=wanted,
                parameters=call.parameters,
                headers=dict(self._headers),  # tritonclient adds to the mapping it is given
            )
        except InferenceServerException as error:
            raise replied(error.status(), error.message()) from None
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(self.url, error, self.timeout_s) from None
        reply = result.get_response()
        arrays = {out["name"]: result.as_numpy(out["name"]) for out in reply.get("outputs", [])}
        return Answer(arrays, reply.get("parameters") or {}, reply.get("model_version", ""))

    def metadata(self, model: str) -> dict[str, Any]:
        """A model's inputs and outputs, as the protocol describes them."""
        reply = self._data.ask("GET", f"/v2/models/{quote(model, safe='')}")
        return dict(reply)

    def config(self, model: str) -> dict[str, Any]:
        """A model's configuration in Triton's form, ``max_batch_size`` for one."""
        return dict(self._data.ask("GET", f"/v2/models/{quote(model, safe='')}/config"))

    def is_hps(self) -> bool:
        """Whether the server at ``url`` is one of ours, by the name it gives itself."""
        return str(self._data.ask("GET", "/v2").get("name", "")).startswith("hps")

    def ready(self) -> bool:
        """Whether the server answers requests by now; ``Unavailable`` when nobody is there."""
        try:
            self._data.ask("GET", "/v2/health/ready")
        except Unavailable as error:
            if isinstance(error, Unreachable):
                raise
            return False
        return True

    def infer_json(self, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One request of the protocol as JSON, and its answer, both as they are."""
        path = f"/v2/models/{quote(model, safe='')}/infer"
        return dict(self._data.ask("POST", path, body))

    def admin(self, path: str, body: Any = None) -> Any:
        """An admin call: GET ``path``, or POST of ``body`` as JSON. Returns the parsed reply."""
        try:
            return self._admin.ask("GET" if body is None else "POST", path, body)
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

    def hot_keys(
        self, model: str | None = None, table: str | None = None, limit: int = 20
    ) -> list[dict[str, Any]]:
        """The hottest keys of the server's CPU cache, by table, with their scores from 255 down."""
        asked = {"model": model, "table": table, "limit": limit}
        query = urlencode({name: value for name, value in asked.items() if value is not None})
        return list(self.admin(f"/v1/hotkeys?{query}")["tables"])

    def metrics(self) -> list[Sample]:
        """The server's metrics: name, labels, value."""
        text = self._admin.fetch("GET", "/metrics").decode()
        return [sample for line in text.splitlines() if (sample := parse_sample(line)) is not None]

    def _datatypes(self, model: str) -> dict[str, Any]:
        """NumPy's type of every input, asked for once: dense values are sent in the model's types."""
        from tritonclient.utils import triton_to_np_dtype

        if model not in self._types:
            tensors = self.metadata(model)["inputs"]
            self._types[model] = {t["name"]: triton_to_np_dtype(t["datatype"]) for t in tensors}
        return self._types[model]

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
