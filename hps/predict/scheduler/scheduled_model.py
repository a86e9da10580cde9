"""ScheduledModel: predictions of one model through the batch scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.bounded_memo import memoize
from hps.observability.meters import LookupMeter, TierMeter
from hps.predict.scheduler.client import SchedulerAnswer, SchedulerClient, Status
from hps.predict.scheduler.columns import Arrays, ModelColumns
from hps.predict.scheduler.replies import decode_reply, encode_request
from hps.tracing import RequestContext
from hps.types import LookupResult, PredictRequest, PredictResult, Source

REPLY_BYTES = 1 << 14
"""Space for an encoded reply beside its outputs: names, errors, reports."""
_METERS_KEPT = 64
_ALONE = 512
"""Batches from which the copies cost more than a common batch gains, for a caller that waits."""

Finish = Callable[[Arrays, LookupResult, float | None], PredictResult]
"""Makes the result from the outputs, the lookup's report, and the seconds that the request took.

None: another process has counted the request."""


PreparedPrediction = Callable[
    [bytes, int, "float | None", "RequestContext | None"], "Future[PredictResult]"
]
"""Starts the prediction in a message that begins at a position, given its deadline and context."""


class ScheduledModel:
    """A model's predictions. Thread-safe.

    ``number`` is the model's at the scheduler. With ``remote`` the scheduler is in another process, and
    every request goes there. Else only those go that have columns and at most ``largest`` samples (None: any
    number): this process runs a larger one as a whole, the scheduler in pieces."""

    def __init__(
        self,
        client: SchedulerClient,
        number: int,
        columns: ModelColumns,
        meters: tuple[LookupMeter, TierMeter],
        *,
        remote: bool,
        largest: int | None = None,
    ) -> None:
        self._client = client
        self._number = number
        self._columns = columns
        self._lookups, self._tier = meters
        self._remote = remote
        self._largest = largest
        self._counted: dict[int, tuple[Callable[[float], None], Callable[[float], None]]] = {}

    def gains_alone(self, batch: int) -> bool:
        """True if a request of ``batch`` samples ends sooner outside of common batches.

        A large one does while no other is in flight: its keys are copied once less, and no other thread is
        woken. Beside others, common batches answer more requests."""
        return not self._remote and batch >= _ALONE and not self._client.is_busy

    def start(
        self,
        request: PredictRequest,
        inputs: Arrays,
        batch: int,
        names: tuple[str, ...],
        finish: Finish,
    ) -> Future[PredictResult] | None:
        """Start a checked request for the outputs ``names``; None if this process must run it otherwise.

        Never blocks. Raises ``Unavailable``."""
        if self._largest is not None and batch > self._largest:
            return None
        plain = not (request.want_source and self._remote)
        columns = self._columns.encode(request, inputs, batch) if plain else None
        if request.want_source or columns is None:
            return self._start_encoded(request, batch, names, finish) if self._remote else None
        out_bytes = batch * self._columns.output_width
        return self._client.submit(
            self._number,
            batch,
            columns,
            (out_bytes, out_bytes + REPLY_BYTES),
            request.deadline,
            partial(self._finish, batch, names, finish, request.origin),
        )

    def prepare(
        self,
        request: PredictRequest,
        inputs: Arrays,
        names: tuple[str, ...],
        places: Mapping[str, tuple[int, int]],
        finish: Finish,
    ) -> PreparedPrediction | None:
        """Prepare requests that differ from ``request`` only in the elements of their tensors.

        ``places``: offset and bytes of each tensor in a message; ``inputs`` as in `start`. None if such
        requests cannot be sent as they are."""
        batch = len(next(iter(inputs.values()))) if inputs else 0
        batch = max([batch, *(jagged.batch for jagged in request.features.values())])
        layout = None
        whole = self._largest is not None and batch > self._largest
        if not request.want_source and not whole:
            layout = self._columns.message_layout(request, inputs, batch, places)
        if layout is None:
            return None
        size = batch * self._columns.output_width
        send = self._client.prepare(self._number, batch, layout, (size, size + REPLY_BYTES))
        complete = partial(self._finish, batch, names, finish, None)

        def submit(
            message: bytes, start: int, deadline: float | None, origin: RequestContext | None
        ) -> Future[PredictResult]:
            if origin is None:
                return send(message, start, deadline, complete)
            end = partial(self._finish, batch, names, finish, origin)
            return send(message, start, deadline, end)

        return submit

    def _finish(
        self,
        batch: int,
        names: tuple[str, ...],
        finish: Finish,
        origin: RequestContext | None,
        answer: SchedulerAnswer,
    ) -> PredictResult:
        """Count an answer and make the result of it."""
        if answer.status == Status.REPLIED:
            return _replied(answer, names, finish)
        if origin is not None and origin.is_profiled:
            origin.stage("device", answer.launched_ns, answer.ended_ns)
        seconds = (answer.ended_ns - answer.launched_ns) * 1e-9
        self._count(answer.direct, seconds)
        outputs = self._columns.decode_outputs(answer.data, batch, names)
        return finish(outputs, LookupResult({}), seconds)

    def _start_encoded(
        self, request: PredictRequest, batch: int, names: tuple[str, ...], finish: Finish
    ) -> Future[PredictResult]:
        data: NDArray[Any] = np.frombuffer(encode_request(request), np.uint8)
        keys = sum(len(jagged.keys) for jagged in request.features.values())
        out_bytes = batch * self._columns.output_width + REPLY_BYTES + 2 * keys

        def complete(answer: SchedulerAnswer) -> PredictResult:
            return _replied(answer, names, finish)

        return self._client.submit(
            self._number, 0, [data], (0, out_bytes), request.deadline, complete
        )

    def _count(self, samples: int, seconds: float) -> None:
        """Count the keys of ``samples`` that were found on the device."""
        if not samples:
            return
        counters = self._counted.get(samples)
        if counters is None:
            fields = list(zip(self._columns.features, self._columns.hotness, strict=True))
            answers = [
                (f.table, bytes([Source.GPU]) * (samples * h), [(f.name, samples * h)])
                for f, h in fields
            ]
            found = [(f.table, samples * h, samples * h) for f, h in fields]
            counters = self._lookups.finished_alike(answers), self._tier.prepare(found)
            memoize(self._counted, samples, counters, _METERS_KEPT)
        for count in counters:
            count(seconds)


def _replied(answer: SchedulerAnswer, names: tuple[str, ...], finish: Finish) -> PredictResult:
    """Return the result of a reply of the slow path, whose process has counted it."""
    reply = decode_reply(answer.data.tobytes())
    rows = LookupResult(
        {},
        reply.sources,
        defaulted=reply.defaulted,
        degraded=reply.degraded,
        stale_s=reply.stale_s,
    )
    return finish({name: reply.outputs[name] for name in names}, rows, None)
