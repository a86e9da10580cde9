"""``hps predict``: score one request, or a file of them."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from hps.cli.command_options import CommandApp
from hps.cli.predict_options import EmptyCells, PredictOptions
from hps.errors import ConfigError
from hps.tools.output import plural, print_line, print_table, warn

if TYPE_CHECKING:
    from hps.cli.predict_targets import PredictTarget
    from hps.cli.request import Features

app = CommandApp(add_completion=False)


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


@app.command(epilog=EXAMPLES)
def predict(options: PredictOptions) -> None:
    """Score one request (--json or --input), or every row of a file.

    A file's columns have the names of the model's features and dense inputs; other columns are ignored.
    Keys are whole numbers from -2^63 to 2^64-1, in text also hexadecimal (0x68fd1e64); no bit is lost.
    A list, or several numbers in a cell, is a multi-hot sample. An empty cell is a sample without
    keys unless --missing says otherwise. Scores are written in the order of the rows."""
    _check_options(options)
    from hps.cli.predict_file import score_file
    from hps.cli.predict_targets import open_target
    from hps.cli.progress import ConsoleProgress
    from hps.models.remote.single_file import downloaded_file

    with open_target(options.server, options.local, options.credentials) as target:
        if isinstance(options.file, str):
            with downloaded_file(options.file, ConsoleProgress()) as file:
                score_file(target, options, file)
        elif options.file is not None:
            score_file(target, options, options.file)
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
