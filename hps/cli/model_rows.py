"""``hps model rows``: the bytes, errors and AUC of a model's tables in each row format."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hps.cli.command_options import argument, option
from hps.cli.options import DEFAULT_REPOSITORY, ReportOptions, RepositoryLocation, repository_option
from hps.cli.row_errors import ERROR_TITLES, errors_row
from hps.errors import BadRequest, ConfigError
from hps.tools.output import count, number, percentage, plural, print_line, print_table, size

if TYPE_CHECKING:
    from hps.models.repository import ModelVersion
    from hps.tools.row_advice import FormatFigures, RowAdvice, TableAdvice
    from hps.tools.row_scores import RecordedRequests

ROWS_EXAMPLES = """\b
Examples:
  hps model rows ctr                 # bytes and errors of each format
  hps model rows ctr --requests test.parquet --labels click
  hps model rows ctr --requests test.csv --labels click --auc-budget 0.001
\b
--requests reads the files that hps predict reads. Scores are computed in this
process with one table in a narrow format, the others in float32.
"""


@dataclass(frozen=True, kw_only=True)
class ModelRowsOptions(ReportOptions):
    name: str = argument()
    """The model."""
    repository: RepositoryLocation = repository_option(DEFAULT_REPOSITORY, "--repository", "-r")
    """The model repository."""
    version: int | None = option(None, "--version", "-v", min=1)
    """The model's version; default: the highest."""
    requests: Path | None = option(None, metavar="FILE")
    """Recorded requests, a sample a row: *.parquet, *.csv, *.tsv or *.jsonl."""
    labels: str | None = option(None, metavar="COLUMN")
    """The file's column with the label of each sample, 0 or 1, for the AUC."""
    auc_budget: float | None = option(None, min=0, max=1)
    """Choose the narrowest formats that together lose at most this much AUC."""
    score: str | None = option(None, metavar="NAME")
    """The network's output to compare; default: the one that top_k sorts by."""
    batch_size: int = option(1024, min=1)
    """Samples per request."""
    columns: str | None = option(None, metavar="NAME[,NAME...]")
    """Names of all columns, for a CSV or TSV file without a header line."""
    hex_keys: bool = option(False)
    """Keys in text are hexadecimal, with or without 0x."""


def rows(options: ModelRowsOptions) -> None:
    """Compare row formats: bytes, errors, scores and AUC.

    Errors are of a value (largest, mean) and of a row, as a share of its norm (mean)."""
    if options.requests is None and (options.labels or options.score):
        raise ConfigError("--labels and --score need --requests FILE")
    if options.auc_budget is not None and options.labels is None:
        raise ConfigError("--auc-budget needs --requests FILE and --labels COLUMN")
    from hps.cli.options import open_repository
    from hps.cli.progress import ConsoleProgress
    from hps.tools.row_advice import advise

    opened = open_repository(options.repository).open(options.name, options.version)
    if options.requests is not None and opened.dense is None:
        raise ConfigError(f"{opened.key} has no network, so --requests gives no scores")
    recorded = None if options.requests is None else _recorded(opened, options, options.requests)
    advice = advise(
        opened,
        recorded,
        output=options.score,
        budget=options.auc_budget,
        progress=ConsoleProgress(),
    )
    report = {"model": opened.name, "version": opened.version, **_json(advice)}
    options.report(report, lambda _report: _show(opened, advice, options.auc_budget))


def _json(advice: RowAdvice) -> dict[str, Any]:
    """The advice as JSON: formats are a list, and each has its errors as a mapping."""
    tables = [
        {
            "name": table.name,
            "rows": table.rows,
            "dim": table.dim,
            "current": table.current,
            "chosen": table.chosen,
            "formats": [
                {
                    "rows": each.name,
                    "bytes": each.bytes,
                    "errors": each.errors.model_dump(exclude={"rows"}),
                    "scores": None if each.scores is None else asdict(each.scores),
                }
                for each in table.formats.values()
            ],
        }
        for table in advice.tables
    ]
    return {
        "samples": advice.samples,
        "output": advice.output,
        "auc": advice.auc,
        "combined": None if advice.combined is None else asdict(advice.combined),
        "tables": tables,
    }


def _recorded(opened: ModelVersion, options: ModelRowsOptions, file: Path) -> RecordedRequests:
    """Read the requests and labels of ``file``. Raises BadRequest, ConfigError."""
    import numpy as np

    from hps.cli.column_arrays import dense_of
    from hps.cli.predict_file import request_of
    from hps.cli.sample_files import open_reader, read
    from hps.tools.row_scores import RecordedRequests
    from hps.tools.signature import ModelSignature

    signature, label = ModelSignature.of_spec(opened.spec), options.labels
    header = tuple(options.columns.split(",")) if options.columns else ()
    names = dict.fromkeys((*signature.names, *([label] if label else ())))
    reader = open_reader(file, tuple(names), header)
    requests, labels, done = [], [np.empty(0, np.float32)], 0
    for columns, _ in read(reader, file, min(options.batch_size, signature.max_batch)):
        requests.append(request_of(signature, columns, done, is_hex=options.hex_keys))
        if label is not None:
            kind = np.dtype(np.float32)
            labels.append(dense_of(label, columns[label], kind, (-1, 1), done).reshape(-1))
        done += len(next(iter(columns.values())))
    if not done:
        raise BadRequest(f"{file} has no samples")
    found = np.concatenate(labels)
    if wrong := [value for value in np.unique(found).tolist() if value not in (0, 1)]:
        raise BadRequest(f"{file}: column '{label}' has the value {wrong[0]:g}; labels are 0 and 1")
    return RecordedRequests(requests, None if label is None else found > 0)


def _show(opened: ModelVersion, advice: RowAdvice, budget: float | None) -> None:
    has_scores = advice.output is not None
    if has_scores:
        auc = "" if advice.auc is None else f"; AUC with float32 rows {advice.auc:.5f}"
        print_line(f"{plural(advice.samples, 'sample')}, output {advice.output}{auc}")
    for table in advice.tables:
        rows = plural(table.rows, "row")
        print_line(f"{opened.key} {table.name}: {rows} of dim {table.dim}, now {table.current}")
        _show_table(table, has_scores=has_scores, has_auc=advice.auc is not None)
    if advice.combined is not None and budget is not None:
        _show_choice(advice, budget)


def _show_table(table: TableAdvice, *, has_scores: bool, has_auc: bool) -> None:
    titles = ["rows", "size", "", *ERROR_TITLES, "not finite"]
    titles += ["max score diff", "mean"] if has_scores else []
    titles += ["AUC", "loss"] if has_auc else []
    widest = table.formats["float32"].bytes
    lines = []
    for each in table.formats.values():
        line = [each.name, size(each.bytes), percentage(each.bytes, widest)]
        line += [*errors_row(each.errors), count(each.errors.not_finite_rows)]
        lines.append((*line, *_score_cells(each, has_scores=has_scores, has_auc=has_auc)))
    print_table(tuple(titles), lines)


def _score_cells(figures: FormatFigures, *, has_scores: bool, has_auc: bool) -> list[str]:
    scores = figures.scores
    found = (None,) * 4 if scores is None else astuple(scores)
    largest, mean, auc, loss = found
    cells: list[str] = [number(largest, "{:.2g}"), number(mean, "{:.2g}")] if has_scores else []
    return cells + ([number(auc, "{:.5f}"), number(loss, "{:z.5f}")] if has_auc else [])


def _show_choice(advice: RowAdvice, budget: float) -> None:
    combined, chosen = advice.combined, {t.name: t.chosen or "float32" for t in advice.tables}
    assert combined is not None  # the caller's
    before = sum(table.formats["float32"].bytes for table in advice.tables)
    after = sum(table.formats[chosen[table.name]].bytes for table in advice.tables)
    formats = set(chosen.values())
    words = formats if len(formats) == 1 else [f"{name}={each}" for name, each in chosen.items()]
    options = " ".join(f"--rows {word}" for word in words)
    print_line()
    print_line(f"For an AUC loss of at most {budget:g}: {options}")
    print_line(
        f"Together: AUC {combined.auc:.5f}, loss {combined.auc_loss:z.5f}; {size(after)} instead of "
        f"{size(before)} of rows ({percentage(after, before)})"
    )
