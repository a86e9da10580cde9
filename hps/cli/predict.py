"""``hps predict``: score one request, or a file of them."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hps.cli.output import Output, OutputFormat, print_json, print_table, say, warn
from hps.cli.targets import (
    HTTP,
    ApiKeyOption,
    ConfigOption,
    ServerOption,
    SetOption,
    Target,
    open_target,
    source_names,
)
from hps.errors import ConfigError

if TYPE_CHECKING:
    from hps.cli.request import Features
    from hps.types import PredictResult

app = typer.Typer(add_completion=False)

EXAMPLES = """\b
Examples:
  hps predict ctr --json '{"user": 17, "ad": [4, 8, 15]}'
  hps predict ctr --input user=17 --input ad=4,8,15 --explain
  hps predict ctr impressions.parquet --out scores.parquet
  hps predict ctr impressions.csv --config config.yaml --out scores.npz
"""
SHOWN_VALUES = 6


@app.command(epilog=EXAMPLES)
def predict(
    model: Annotated[str, typer.Argument(help="The model to ask.")],
    file: Annotated[
        Path | None, typer.Argument(help="Samples to score: *.parquet, *.csv or *.jsonl.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Scores to write: *.parquet, *.csv, *.jsonl, *.npz."),
    ] = None,
    json_text: Annotated[
        str | None, typer.Option("--json", help="One request as JSON; - reads it from stdin.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", "-i", metavar="NAME=VALUES", help="One request, input by input."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show vectors, their tiers and the dense inputs.")
    ] = False,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Keep the k best.")] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Samples in one request, of a file.")
    ] = 1024,
    server: ServerOption = HTTP,
    config: ConfigOption = None,
    overrides: SetOption = None,
    api_key: ApiKeyOption = None,
    output: Output = OutputFormat.table,
) -> None:
    """Score one request (--json or --input), or every row of a file.

    A file's columns are named as the model's features and dense inputs; others are ignored. Keys
    are whole numbers from -2^63 to 2^64-1 and keep every bit, in CSV too. A list, or several numbers
    in a cell, is a multi-hot sample; an empty cell is a sample without keys. Scores come in the
    order of the rows.
    """
    given = sum(part is not None for part in (file, json_text, inputs))
    if given != 1:
        raise ConfigError("give one of a file, --json or --input; see hps predict --help")
    if file is not None and (explain or top_k):
        raise ConfigError("--explain and --top-k are for one request, not for a file")
    if file is None and out is not None:
        raise ConfigError("--out is for the scores of a file")
    with open_target(server, config, overrides, api_key) as target:
        if file is not None:
            _file(target, model, file, out, batch_size)
        else:
            _one(target, model, json_text, inputs or [], top_k, explain, output)


def _file(target: Target, model: str, file: Path, out: Path | None, batch_size: int) -> None:
    from hps.cli.columns import dense_of, keys_of
    from hps.cli.files import Writer, json_lines, open_reader, read
    from hps.cli.progress import ConsoleProgress

    signature = target.signature(model)
    reader = open_reader(file, signature.names)
    writer = None if out is None else Writer(out)
    rows = defaulted = keys = 0
    degraded: set[str] = set()

    def score(columns: Any) -> PredictResult:
        nonlocal keys
        features = {f: keys_of(f, columns[f], rows) for f in signature.features}
        dense = {
            name: dense_of(name, columns[name], wanted.dtype, wanted.shape, rows)
            for name, wanted in signature.dense.items()
        }
        keys += sum(len(k.keys) for k in features.values())
        return target.predict(model, features, dense)

    started = time.monotonic()
    with (
        ConsoleProgress().task(f"Scoring {file.name}", reader.total, reader.unit) as advance,
        writer or nullcontext(),
    ):
        for columns, step in read(reader, file, min(batch_size, signature.max_batch)):
            result = score(columns)
            if writer is not None:
                writer.write(result.outputs)
            else:
                sys.stdout.write(json_lines(result.outputs).decode())
            rows += len(next(iter(result.outputs.values())))
            defaulted += result.defaulted
            degraded |= set(result.degraded)
            advance(step)
    if degraded:
        warn(f"answered without {', '.join(sorted(degraded))}, which did not work")
    if out is not None:
        _summary(out, rows, keys, defaulted, time.monotonic() - started)


def _summary(out: Path, rows: int, keys: int, defaulted: int, seconds: float) -> None:
    from hps.cli.output import console, count, share

    rate = f"{rows / seconds:,.0f} rows/s" if seconds > 0 else ""
    console(stderr=True).print(
        f"{count(rows)} rows scored into {out}, {rate}; {count(defaulted)} of {count(keys)} keys "
        f"({share(defaulted, keys)}) unknown and answered with the table's default",
        soft_wrap=True,
    )


def _one(
    target: Target,
    model: str,
    json_text: str | None,
    inputs: list[str],
    top_k: int | None,
    explain: bool,
    output: OutputFormat,
) -> None:
    from hps.cli.request import parse_flags, parse_json

    signature = target.signature(model)
    if json_text is not None:
        text = sys.stdin.read() if json_text == "-" else json_text
        features, dense = parse_json(text, signature)
    else:
        features, dense = parse_flags(inputs, signature)
    started = time.perf_counter()
    result = target.predict(model, features, dense, top_k)
    milliseconds = 1000 * (time.perf_counter() - started)
    report: dict[str, Any] = {
        "model": model,
        "outputs": result.outputs,
        "defaulted": result.defaulted,
        "degraded": list(result.degraded),
        "milliseconds": round(milliseconds, 3),
    }
    if explain:
        report["features"] = _account(target, model, features)
        report["dense"] = dense
    if output is OutputFormat.json:
        print_json(report)
    else:
        _show(report)


def _account(target: Target, model: str, features: Features) -> dict[str, Any]:
    """Per feature: its keys, where each row came from, and the vectors that the network takes."""
    found = target.lookup(model, features)
    takes = target.network_inputs(model)
    return {
        name: {
            "network_input": takes.get(name, name),
            "keys": keys.keys,
            "offsets": keys.offsets,
            "sources": source_names(found.sources[name]),
            "vectors": found.vectors[name],
        }
        for name, keys in features.items()
    }


def _show(report: dict[str, Any]) -> None:
    outputs = report["outputs"]
    rows = max((len(value) for value in outputs.values()), default=0)
    print_table(
        ("sample", *outputs),
        [(i, *(_values(value[i]) for value in outputs.values())) for i in range(rows)],
    )
    for name, feature in report.get("features", {}).items():
        say()
        say(f"feature {name} -> network input {feature['network_input']}", style="bold")
        print_table(("sample", "keys, and where each came from", "vector"), _explained(feature))
    for name, value in report.get("dense", {}).items():
        say()
        say(f"dense input {name}", style="bold")
        print_table(("sample", "values"), [(i, _values(v)) for i, v in enumerate(value)])
    say()
    say(
        f"{report['milliseconds']:.2f} ms, {report['defaulted']} unknown keys answered with the "
        "table's default"
    )
    if report["degraded"]:
        warn(f"answered without {', '.join(report['degraded'])}, which did not work")


def _explained(feature: dict[str, Any]) -> list[tuple[Any, ...]]:
    """One row a sample; one a key where vectors are not pooled."""
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
    """Numbers in full precision; long vectors cut (``--output json`` has them whole)."""
    flat = value.reshape(-1).tolist()
    if len(flat) == 1:
        return f"{flat[0]:.7g}"
    shown = " ".join(f"{number:.5g}" for number in flat[:SHOWN_VALUES])
    return shown if len(flat) <= SHOWN_VALUES else f"{shown} … ({len(flat)} values)"
