"""Batches of a file: several requests at a time, answers in the order of the rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hps.cli.predict_file import IN_FLIGHT, ScoreStream
from hps.cli.predict_targets import ServerTarget
from hps.client import Answer, Client
from hps.errors import BadRequest, Unavailable
from hps.tools.signature import DenseInput, ModelSignature
from hps.types import PredictRequest, PredictResult

MODEL = ModelSignature("ctr", ("user",), {"price": DenseInput(np.dtype(np.float32), (-1, 1))})


class Server:
    """Answers the newest request first, and only when the caller waits for one."""

    def __init__(self) -> None:
        self.open: list[tuple[Future[PredictResult], PredictRequest]] = []
        self.most = 0

    def submit(self, model: str, request: PredictRequest) -> Future[PredictResult]:
        assert model == "ctr"
        server = self

        class Lazy(Future[PredictResult]):
            def result(self, timeout: float | None = None) -> PredictResult:
                server.answer()
                return super().result(timeout)

        future = Lazy()
        self.open.append((future, request))
        self.most = max(self.most, len(self.open))
        return future

    def answer(self) -> None:
        while self.open:
            future, request = self.open.pop()
            keys = request.features["user"].keys
            if (keys < 0).any():
                future.set_exception(Unavailable("no"))
            else:
                scores = {"score": keys + request.dense["price"][:, 0]}
                future.set_result(PredictResult(scores, defaulted=1, degraded=("redis",)))


def batches(count: int, read: list[int]) -> Iterator[tuple[dict[str, Any], int]]:
    for i in range(count):
        read.append(i)
        yield {"user": pa.array([10 * i, 10 * i + 1]), "price": pa.array([0.5, 0.25])}, 2


@pytest.mark.parametrize("count", [0, 1, IN_FLIGHT, 3 * IN_FLIGHT + 1])
def test_scores_are_in_the_order_of_the_rows(count: int) -> None:
    server, score, read = Server(), ScoreStream("ctr", MODEL), []
    seen: list[float] = []
    for result, step in score.in_order(batches(count, read), server.submit):
        assert step == 2
        assert len(read) - len(seen) // 2 <= IN_FLIGHT
        seen += result.outputs["score"].tolist()
    assert seen == [10 * i + x for i in range(count) for x in (0.5, 1.25)]
    assert server.most == min(count, IN_FLIGHT)
    assert (score.rows, score.keys, score.defaulted) == (2 * count, 2 * count, count)
    assert score.degraded == ({"redis"} if count else set())


def test_failed_request_ends_after_earlier_scores() -> None:
    server, score = Server(), ScoreStream("ctr", MODEL)
    columns = [
        ({"user": pa.array([key]), "price": pa.array([0.0])}, 1) for key in (1, 2, -3, 4, 5, 6, 7)
    ]
    scores = score.in_order(columns, server.submit)
    assert [next(scores)[0].outputs["score"].tolist() for _ in range(2)] == [[1], [2]]
    with pytest.raises(Unavailable):
        next(scores)


def test_bad_cell_names_its_row_in_the_file() -> None:
    columns = [
        ({"user": pa.array(["1", "2"]), "price": pa.array(["1", "2"])}, 2),
        ({"user": pa.array(["3", "x"]), "price": pa.array(["1", "2"])}, 2),
    ]
    with pytest.raises(BadRequest, match="column 'user', row 4: 'x' is not"):
        list(ScoreStream("ctr", MODEL).in_order(columns, Server().submit))


class Meeting(Client):
    """Answers once as many requests are in flight as ``together`` waits for."""

    together = threading.Barrier(IN_FLIGHT)

    def infer(self, model: str, inputs: Any, **_more: Any) -> Answer:
        self.together.wait(60)
        return Answer({"score": inputs["user"] + inputs["price"]})


def test_several_requests_are_in_flight() -> None:
    assert IN_FLIGHT > 1
    score = ScoreStream("ctr", MODEL)
    with ServerTarget(Meeting()).submitting(IN_FLIGHT) as submit:
        results = list(score.in_order(batches(2 * IN_FLIGHT, []), submit))
    firsts = [float(result.outputs["score"][0, 0]) for result, _ in results]
    assert firsts == [10 * i + 0.5 for i in range(2 * IN_FLIGHT)]
