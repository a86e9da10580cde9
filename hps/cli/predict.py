"""``hps predict``: score one request, or a file of them."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hps.cli.command_options import CommandApp, argument, option
from hps.cli.options import HTTP, Credentials, LocalNode, ReportOptions
from hps.errors import ConfigError, NotFound, Unsupported
from hps.tools.output import plural, print_line, print_table, warn

if TYPE_CHECKING:
    from hps.cli.predict_targets import PredictTarget, Submit
    from hps.cli.request import Features
    from hps.tools.signature import ModelSignature
    from hps.types import KeyArray, PredictRequest, PredictResult

app = CommandApp(add_completion=False)


class EmptyCells(StrEnum):
    """Treatment of a feature's empty cells."""

    empty = "empty"
    default = "default"


EXAMPLES = """\b
Examples:
  hps predict ctr --json '{"user": 17, "ad": [4, 8, 15]}'
  hps predict ctr --input user=17 --input ad=4,8,15 --explain
  hps predict ctr impressions.parquet --out scores.parquet
  hps predict ctr impressions.csv --config config.yaml --out scores.npz
  hps predict ctr day_23.tsv --columns label,price,ad,user --hex-keys \\
      --missing default
"""
SHOWN_VALUES = 6
# Random keys to try, until one has no row.
_ATTEMPTS = 20
# Requests in flight for a file: the server scores some while others are read and written.
IN_FLIGHT = 4


@dataclass(frozen=True, kw_only=True)
class PredictOptions(ReportOptions):
    model: str = argument()
    """The model to score with."""
    file: Path | None = argument(None)
    """File of samples to score: *.parquet, *.csv, *.tsv or *.jsonl."""
    out: Path | None = option(None)
    """File to write the scores to: *.parquet, *.csv, *.jsonl or *.npz."""
    json_text: str | None = option(None, "--json")
    """One request as JSON; - reads it from stdin."""
    inputs: list[str] | None = option(None, "--input", "-i", metavar="NAME=VALUES")
    """One input of a single request; repeat for each input."""
    explain: bool = option(False)
    """Also show the vectors, the tiers of their rows, and the dense inputs."""
    top_k: int | None = option(None, min=1)
    """Return only the k samples with the highest scores."""
    batch_size: int = option(1024, min=1)
    """Samples per request, for a file."""
    columns: str | None = option(None, metavar="NAME[,NAME...]")
    """Names of all columns, for a CSV or TSV file without a header line."""
    hex_keys: bool = option(False)
    """Keys in text are hexadecimal, with or without 0x."""
    missing: EmptyCells = option(EmptyCells.empty)
    """Treat an empty cell or null of a feature as a sample without keys (empty), or as an unknown
    key (default)."""
    server: str = option(HTTP, "--server", "-s", metavar="URL")
    """The server's address for requests."""
    local: LocalNode
    credentials: Credentials


@app.command(epilog=EXAMPLES)
def predict(options: PredictOptions) -> None:
    """Score one request (--json or --input), or every row of a file.

    A file's columns have the names of the model's features and dense inputs; other columns are ignored.
    Keys are whole numbers from -2^63 to 2^64-1, in text also hexadecimal (0x68fd1e64); no bit is lost.
    A list, or several numbers in a cell, is a multi-hot sample. An empty cell is a sample without
    keys unless --missing says otherwise. Scores are written in the order of the rows."""
    _check_options(options)
    from hps.cli.predict_targets import open_target

    with open_target(options.server, options.local, options.credentials) as target:
        if options.file is not None:
            _file(target, options, options.file)
        else:
            _one(target, options)


def _check_options(options: PredictOptions) -> None:
    sources = (options.file, options.json_text, options.inputs)
    if sum(part is not None for part in sources) != 1:
        raise ConfigError("give one of a file, --json or --input; see hps predict --help")
    if options.file is not None and (options.explain or options.top_k):
        raise ConfigError("--explain and --top-k are for one request, not for a file")
    is_of_file = options.out is not None or options.columns or options.hex_keys
    if options.file is None and (is_of_file or options.missing is not EmptyCells.empty):
        raise ConfigError("--out, --columns, --hex-keys and --missing are for a file of samples")


def _file(target: PredictTarget, options: PredictOptions, file: Path) -> None:
    from hps.cli.progress import ConsoleProgress
    from hps.cli.sample_files import SampleWriter, json_lines, open_reader, read

    model, out = options.model, options.out
    signature = target.signature(model)
    header = tuple(options.columns.split(",")) if options.columns else ()
    reader = open_reader(file, signature.names, header)
    writer = None if out is None else SampleWriter(out)
    unknown = cache(partial(_unknown_keys, target, model, signature))
    missing = None if options.missing is EmptyCells.empty else unknown
    score = _ScoreStream(model, signature, is_hex=options.hex_keys, missing=missing)
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
    import numpy as np

    from hps.types import JaggedKeys

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


class _ScoreStream:
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
        asked: deque[tuple[Future[PredictResult], int]] = deque()
        for columns, step in batches:
            asked.append((submit(self._model, self._request(columns)), step))
            if len(asked) == IN_FLIGHT:
                yield self._next(asked)
        while asked:
            yield self._next(asked)

    def _request(self, columns: Mapping[str, Any]) -> PredictRequest:
        from hps.cli.column_arrays import dense_of, keys_of
        from hps.types import PredictRequest

        wanted = self._signature
        features = {
            f: keys_of(
                f,
                columns[f],
                self.rows,
                is_hex=self._is_hex,
                missing=self._missing,
                hotness=wanted.hotness.get(f),
            )
            for f in wanted.features
        }
        dense = {
            name: dense_of(name, columns[name], tensor.dtype, tensor.shape, self.rows)
            for name, tensor in wanted.dense.items()
        }
        self.keys += sum(len(k.keys) for k in features.values())
        self.rows += len(next(iter(columns.values())))
        return PredictRequest(features, dense)

    def _next(self, asked: deque[tuple[Future[PredictResult], int]]) -> tuple[PredictResult, int]:
        future, step = asked.popleft()
        result = future.result()
        self.defaulted += result.defaulted
        self.degraded |= set(result.degraded)
        return result, step


def _summary(out: Path, score: _ScoreStream, seconds: float) -> None:
    from hps.tools.output import console, count, percentage, plural

    rows, keys, defaulted = score.rows, score.keys, score.defaulted
    rate = f"{rows / seconds:,.0f} rows/s" if seconds > 0 else ""
    console(stderr=True).print(
        f"{plural(rows, 'row')} scored into {out}, {rate}; {count(defaulted)} of {count(keys)} keys "
        f"({percentage(defaulted, keys)}) unknown and answered with the table's default",
        soft_wrap=True,
    )


def _one(target: PredictTarget, options: PredictOptions) -> None:
    from hps.cli.request import parse_flags, parse_json
    from hps.types import PredictRequest

    model, json_text, top_k = options.model, options.json_text, options.top_k
    signature = target.signature(model)
    if json_text is not None:
        text = sys.stdin.read() if json_text == "-" else json_text
        features, dense = parse_json(text, signature)
    else:
        features, dense = parse_flags(options.inputs or [], signature)
    started = time.perf_counter()
    result = target.predict(model, PredictRequest(features, dense, top_k=top_k))
    milliseconds = 1000 * (time.perf_counter() - started)
    report: dict[str, Any] = {
        "model": model,
        "outputs": result.outputs,
        "defaulted": result.defaulted,
        "degraded": list(result.degraded),
        "stale_s": result.stale_s,
        "milliseconds": round(milliseconds, 3),
    }
    if options.explain:
        report["features"] = _account(target, model, features)
        report["dense"] = dense
    options.report(report, _show)


def _account(target: PredictTarget, model: str, features: Features) -> dict[str, Any]:
    """Explain a request, per feature and table: keys, the source of each row, vectors.

    The vectors are those that the network receives."""
    from hps.cli.predict_targets import source_names

    found = target.lookup(model, features)
    takes = target.network_inputs(model)
    account = {}
    for name, vectors in found.vectors.items():
        keys = features[name.partition(".")[0]]
        account[name] = {
            "network_input": takes.get(name),
            "keys": keys.keys,
            "offsets": keys.offsets,
            "sources": source_names(found.sources[name]),
            "vectors": vectors,
        }
    return account


def _show(report: dict[str, Any]) -> None:
    outputs = report["outputs"]
    rows = max((len(value) for value in outputs.values()), default=0)
    print_table(
        ("sample", *outputs),
        [(i, *(_values(value[i]) for value in outputs.values())) for i in range(rows)],
    )
    for name, feature in report.get("features", {}).items():
        print_line()
        taken = feature["network_input"]
        print_line(
            f"feature {name}" + (f" -> network input {taken}" if taken else ""), style="bold"
        )
        print_table(("sample", "keys, and where each came from", "vector"), _explained(feature))
    for name, value in report.get("dense", {}).items():
        print_line()
        print_line(f"dense input {name}", style="bold")
        print_table(("sample", "values"), [(i, _values(v)) for i, v in enumerate(value)])
    print_line()
    print_line(
        f"{report['milliseconds']:.2f} ms, {plural(report['defaulted'], 'unknown key')} answered with the "
        "table's default"
    )
    if report["stale_s"]:
        warn(f"updates have been waiting for {report['stale_s']} s: rows may be that old")
    if report["degraded"]:
        warn(f"answered without {', '.join(report['degraded'])}, which was unavailable")


def _explained(feature: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Table rows of a feature: one per sample, or one per key if vectors are not pooled."""
    found = zip(feature["keys"].tolist(), feature["sources"], strict=True)
    keys = [f"{key} ({source})" for key, source in found]
    vectors, ends = feature["vectors"], feature["offsets"]
    if ends is None or len(vectors) == len(keys) != len(ends) - 1:
        width = len(keys) // max(len(vectors), 1)
        ends = [i * width for i in range(len(vectors) + 1)]
    return [
        (i, " ".join(keys[ends[i] : ends[i + 1]]), _values(vector))
        for i, vector in enumerate(vectors)
    ]


def _values(value: Any) -> str:
    """Format numbers in full precision; truncate long vectors (not with ``--output json``)."""
    flat = value.reshape(-1).tolist()
    if len(flat) == 1:
        return f"{flat[0]:.7g}"
    shown = " ".join(f"{number:.5g}" for number in flat[:SHOWN_VALUES])
    return shown if len(flat) <= SHOWN_VALUES else f"{shown} … ({len(flat)} values)"
