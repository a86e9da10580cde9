"""The scores of a file of samples: batches read, scored in parallel and written in order."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from hps.cli.column_arrays import dense_of, keys_of
from hps.cli.predict_options import EmptyCells, PredictOptions
from hps.cli.predict_targets import PredictTarget, Submit
from hps.cli.progress import ConsoleProgress
from hps.cli.sample_files import SampleWriter, json_lines, open_reader, read
from hps.errors import NotFound, Unsupported
from hps.tools.output import console, count, percentage, plural, warn
from hps.tools.signature import ModelSignature
from hps.types import JaggedKeys, KeyArray, PredictRequest, PredictResult

# Random keys to try, until one has no row.
_ATTEMPTS = 20
# Requests in flight for a file: the server scores some while others are read and written.
IN_FLIGHT = 4


def score_file(target: PredictTarget, options: PredictOptions, file: Path) -> None:
    """Score the samples of ``file``; write the scores to ``--out``, or print them as JSON lines."""
    model, out = options.model, options.out
    signature = target.signature(model)
    header = tuple(options.columns.split(",")) if options.columns else ()
    reader = open_reader(file, signature.names, header)
    writer = None if out is None else SampleWriter(out)
    unknown = cache(partial(_unknown_keys, target, model, signature))
    missing = None if options.missing is EmptyCells.empty else unknown
    score = ScoreStream(model, signature, is_hex=options.hex_keys, missing=missing)
    started = time.monotonic()
    with (
        ConsoleProgress().task(f"Scoring {file.name}", reader.total, reader.unit) as advance,
        writer or nullcontext(),
        target.submitting(IN_FLIGHT) as submit,
    ):
        batches = read(reader, file, min(options.batch_size, signature.max_batch))
        for result, step in score.in_order(batches, submit):
            if writer is not None:
                writer.write(result.outputs)
            else:
                sys.stdout.write(json_lines(result.outputs).decode())
            advance(step)
    if score.degraded:
        warn(f"answered without {', '.join(sorted(score.degraded))}, which was unavailable")
    if out is not None:
        _summary(out, score, time.monotonic() - started)


def _unknown_keys(
    target: PredictTarget, model: str, signature: ModelSignature, feature: str
) -> KeyArray:
    """Find unknown keys, as many as a sample has, without a row in any of the feature's tables.

    Raises ``Unsupported``."""
    random = np.random.default_rng()
    for _ in range(_ATTEMPTS):
        keys = random.integers(-(2**63), 2**63, signature.hotness.get(feature, 1), np.int64)
        try:
            found = target.lookup(model, {feature: JaggedKeys(keys, 1)})
        except NotFound as error:
            raise Unsupported(
                f"--missing default looks up unknown keys, which this server rejects: {error}"
            ) from None
        if not any(codes.any() for codes in found.sources.values()):
            return keys
    raise Unsupported(f"feature {feature!r}: no unknown key found; its table may have all keys")


class ScoreStream:
    """Scores batches of a file in order; counts rows, keys, unknown keys and skipped tiers."""

    def __init__(
        self,
        model: str,
        signature: ModelSignature,
        *,
        is_hex: bool = False,
        missing: Callable[[str], KeyArray] | None = None,
    ) -> None:
        """``is_hex``, ``missing``: see `hps.cli.column_arrays.keys_of`."""
        self._model = model
        self._signature = signature
        self._is_hex, self._missing = is_hex, missing
        self.rows = self.keys = self.defaulted = 0
        self.degraded: set[str] = set()

    def in_order(
        self, batches: Iterable[tuple[Mapping[str, Any], int]], submit: Submit
    ) -> Iterator[tuple[PredictResult, int]]:
        """Yield each batch's scores and progress.

        At most ``IN_FLIGHT`` batches are held: the next one is read when the oldest has been written."""
        pending: deque[tuple[Future[PredictResult], int]] = deque()
        for columns, step in batches:
            pending.append((submit(self._model, self._request(columns)), step))
            if len(pending) == IN_FLIGHT:
                yield self._next(pending)
        while pending:
            yield self._next(pending)

    def _request(self, columns: Mapping[str, Any]) -> PredictRequest:
        request = request_of(
            self._signature, columns, self.rows, is_hex=self._is_hex, missing=self._missing
        )
        self.keys += sum(len(k.keys) for k in request.features.values())
        self.rows += len(next(iter(columns.values())))
        return request

    def _next(self, pending: deque[tuple[Future[PredictResult], int]]) -> tuple[PredictResult, int]:
        future, step = pending.popleft()
        result = future.result()
        self.defaulted += result.defaulted
        self.degraded |= set(result.degraded)
        return result, step


def request_of(
    signature: ModelSignature,
    columns: Mapping[str, Any],
    first_row: int,
    *,
    is_hex: bool = False,
    missing: Callable[[str], KeyArray] | None = None,
) -> PredictRequest:
    """The request of a batch of columns; for the other arguments see `hps.cli.column_arrays.keys_of`."""
    features = {
        f: keys_of(
            f,
            columns[f],
            first_row,
            is_hex=is_hex,
            missing=missing,
            hotness=signature.hotness.get(f),
        )
        for f in signature.features
    }
    dense = {
        name: dense_of(name, columns[name], tensor.dtype, tensor.shape, first_row)
        for name, tensor in signature.dense.items()
    }
    return PredictRequest(features, dense)


def _summary(out: Path, score: ScoreStream, seconds: float) -> None:
    rows, keys, defaulted = score.rows, score.keys, score.defaulted
    rate = f"{rows / seconds:,.0f} rows/s" if seconds > 0 else ""
    console(stderr=True).print(
        f"{plural(rows, 'row')} scored into {out}, {rate}; {count(defaulted)} of {count(keys)} keys "
        f"({percentage(defaulted, keys)}) unknown and answered with the table's default",
        soft_wrap=True,
    )
