"""Advice on row formats: per table the bytes, the errors and the AUC with each format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hps.models.external_sort import block_rows
from hps.models.manifest import RowConversion
from hps.models.repository import ModelVersion
from hps.models.row_errors import RowErrors, measure_errors
from hps.row_format import ROW_FORMAT_NAMES, row_format
from hps.tiers.stored_rows import to_finite_rows
from hps.tools.row_scores import RecordedRequests, Rows, RowScorer, auc
from hps.types import EmbeddingTable, KeyArray, Progress

NARROW = ROW_FORMAT_NAMES[1:]


@dataclass(frozen=True, slots=True)
class ScoreChange:
    """Scores compared with those of float32 rows; ``auc`` and ``auc_loss`` are None without labels."""

    max_difference: float
    mean_difference: float
    auc: float | None
    auc_loss: float | None


@dataclass(slots=True)
class FormatFigures:
    """A table in one format: bytes of its rows, their errors, and the scores with only this table in it."""

    name: str
    bytes: int
    errors: RowConversion
    scores: ScoreChange | None = None


@dataclass(slots=True)
class TableAdvice:
    """The figures of a table, by format; ``current``: the format that it has. ``chosen``: for the budget."""

    name: str
    rows: int
    dim: int
    current: str
    formats: dict[str, FormatFigures] = field(default_factory=dict)
    chosen: str | None = None


@dataclass(slots=True)
class RowAdvice:
    """``auc``: with float32 rows. ``combined``: the scores with the chosen formats together."""

    tables: list[TableAdvice]
    samples: int = 0
    output: str | None = None
    auc: float | None = None
    combined: ScoreChange | None = None


def measure_formats(
    version: ModelVersion, wanted: Mapping[str, KeyArray], progress: Progress
) -> tuple[list[TableAdvice], dict[str, Rows]]:
    """Measure all formats in one pass over the rows; also return the rows of the keys ``wanted``, by table.

    ``wanted`` (n,): ascending. Raises ModelError."""
    found, rows = [], {}
    tables = version.embedding_tables()
    for spec in version.spec.tables:
        files, table = version.tables[spec.name], tables[spec.name]
        errors = {name: RowErrors() for name in ROW_FORMAT_NAMES}
        keys, vectors = [np.empty(0, np.int64)], [np.empty((0, spec.dim), np.float32)]
        with progress.task(f"measuring {spec.name}", files.rows) as step:
            for some_keys, block in files.blocks(block_rows(spec.dim)):
                for name, sums in errors.items():
                    sums.add(_errors(spec.name, name, block))
                if spec.name in wanted:
                    narrowed = table.narrow(some_keys)
                    chosen = _among(narrowed, wanted[spec.name])
                    keys.append(narrowed[chosen])
                    vectors.append(block[chosen])
                step(len(block))
        rows[spec.name] = np.concatenate(keys), np.concatenate(vectors)
        advice = TableAdvice(spec.name, files.rows, spec.dim, spec.row_format)
        for name, sums in errors.items():
            kind = row_format(name)
            size = files.rows * kind.row_bytes(spec.dim)
            advice.formats[name] = FormatFigures(name, size, sums.conversion(kind))
        found.append(advice)
    return found, rows


def _among(keys: KeyArray, wanted: KeyArray) -> NDArray[np.bool_]:
    """Return which of ``keys (n,)`` are among ``wanted (m,)``, ascending."""
    at = np.searchsorted(wanted, keys)
    found: NDArray[np.bool_] = at < len(wanted)
    found[found] = wanted[at[found]] == keys[found]
    return found


def _errors(table: str, name: str, vectors: NDArray[np.float32]) -> RowErrors:
    narrow = EmbeddingTable.make(table, vectors.shape[1], rows=name)
    rows, usable = to_finite_rows(narrow, vectors)
    if usable.all():
        return measure_errors(narrow, vectors, rows)
    found = measure_errors(narrow, vectors[usable], rows[usable])
    found.not_finite += int(np.count_nonzero(~usable))
    return found


def advise(
    version: ModelVersion,
    recorded: RecordedRequests | None = None,
    *,
    output: str | None = None,
    budget: float | None = None,
    progress: Progress,
) -> RowAdvice:
    """Measure every format of every table, with ``recorded`` requests also the scores with it.

    ``output``: see `RowScorer`. ``budget``: the AUC that the choice of formats may lose. Raises ModelError,
    and BadRequest if all labels are the same."""
    keys = {} if recorded is None else recorded.keys(version.spec, version.embedding_tables())
    tables, rows = measure_formats(version, keys, progress)
    advice = RowAdvice(tables)
    if recorded is None:
        return advice
    scorer = RowScorer(version, rows, recorded, output)
    comparison = _Comparison(scorer, recorded.labels)
    advice.output, advice.auc = scorer.output, comparison.auc
    advice.samples = len(comparison.exact)
    loss = None if comparison.auc is None else 0.0
    with progress.task("scoring", len(tables) * len(NARROW), "runs") as step:
        for table in tables:
            table.formats["float32"].scores = ScoreChange(0.0, 0.0, comparison.auc, loss)
            for figures in _storable(table):
                figures.scores = comparison.change({table.name: figures.name})
                step(1)
    if budget is not None:
        advice.combined = choose(tables, budget, comparison.change)
    return advice


class _Comparison:
    """Scores with narrow rows against those with float32 rows."""

    def __init__(self, scorer: RowScorer, labels: NDArray[np.bool_] | None) -> None:
        self._scorer, self._labels = scorer, labels
        self.exact = scorer.scores({})
        self.auc = None if labels is None else auc(labels, self.exact)

    def change(self, formats: Mapping[str, str]) -> ScoreChange:
        found = self._scorer.scores(formats)
        difference = np.abs(found - self.exact)
        largest, mean = (
            float(difference.max(initial=0)),
            float(difference.sum()) / max(len(found), 1),
        )
        if self._labels is None or self.auc is None:
            return ScoreChange(largest, mean, None, None)
        narrow = auc(self._labels, found)
        return ScoreChange(largest, mean, narrow, self.auc - narrow)


def _storable(table: TableAdvice) -> list[FormatFigures]:
    """The narrow formats that can hold all rows, the narrowest first; of two as narrow the more exact one."""
    broken = table.formats["float32"].errors.not_finite_rows
    narrow = [table.formats[name] for name in NARROW]
    storable = [each for each in narrow if each.errors.not_finite_rows <= broken == 0]
    return sorted(storable, key=lambda each: (each.bytes, each.errors.mean_error))


def choose(
    tables: list[TableAdvice],
    budget: float,
    change: Callable[[Mapping[str, str]], ScoreChange],
) -> ScoreChange:
    """Choose the narrowest format per table so that all together lose at most ``budget`` of AUC.

    Greedy: the largest tables first, each with the formats chosen before it. A format that loses more
    alone is not tried. ``change`` returns the scores with tables in other formats. Returns the choice's."""
    chosen: dict[str, str] = {}
    for table in sorted(tables, key=lambda each: -each.formats["float32"].bytes):
        table.chosen = "float32"
        for figures in _storable(table):
            if figures.scores is None or not _fits(figures.scores, budget):
                continue
            trial = {**chosen, table.name: figures.name}
            if len(trial) == 1 or _fits(change(trial), budget):
                table.chosen, chosen = figures.name, trial
                break
    return change(chosen)


def _fits(scores: ScoreChange, budget: float) -> bool:
    return scores.auc_loss is not None and scores.auc_loss <= budget
