"""Options of `hps model import` about tables, keys and features, parsed and checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from hps.config import ModelSpec
from hps.config.config_errors import validate
from hps.config.model_schema import Datatype, DenseSpec, FeatureSpec, TensorSpec
from hps.errors import ConfigError, ModelError
from hps.models.importers import ImportPlan, TableChoice
from hps.models.table_sharing import Base
from hps.row_format import ROW_FORMAT_NAMES
from hps.suggestions import hint_for
from hps.types import Pooling

FEATURE_FORM = "NAME=TABLE[,TABLE...][+OFFSET][:OPTION...]"
WATERMARK_FORM = "TOPIC/PARTITION=OFFSET, both numbers from 0"
FEATURE_OPTIONS = (
    "sum, mean, sqrtn, none, context, hotness=N, max_hotness=N, max_length=N, keep_first or "
    "keep_last"
)


def pairs(option: str, values: Sequence[str] | None, form: str) -> dict[str, str]:
    """Parse ``NAME=VALUE`` options: ``["a=b"]`` -> ``{"a": "b"}``. Raises ConfigError."""
    found: dict[str, str] = {}
    for text in values or ():
        name, equals, value = text.partition("=")
        if not (equals and name and value):
            raise ConfigError(f"{option} {text}: expected {form}")
        if name in found:
            raise ConfigError(f"{option} names '{name}' twice")
        found[name] = value
    return found


def choices(
    tables: Sequence[str] | None, keys: Sequence[str] | None, vectors: Sequence[str] | None
) -> list[TableChoice]:
    """The tables of --table with their --keys and --vectors."""
    chosen = [TableChoice.parse(text) for text in tables or ()]
    named_keys = pairs("--keys", keys, "TABLE=ARRAY or TABLE=COLUMN")
    named_vectors = pairs("--vectors", vectors, "TABLE=PATTERN")
    for option, named in (("--keys", named_keys), ("--vectors", named_vectors)):
        for name in named:
            if name not in [c.name for c in chosen]:
                known = ", ".join(c.name for c in chosen if c.name) or "none"
                raise ConfigError(
                    f"{option} names table '{name}', --table names {known}; add --table {name}=SOURCE"
                )
    return [
        replace(c, keys=named_keys.get(c.name), vectors=named_vectors.get(c.name)) for c in chosen
    ]


def features(values: Sequence[str] | None) -> list[FeatureSpec]:
    """Parse --feature: ``NAME=TABLE[,TABLE...][+OFFSET][:OPTION...]``; see `FEATURE_OPTIONS`."""
    found = []
    for name, text in pairs("--feature", values, FEATURE_FORM).items():
        tables, *options = text.split(":")
        table, _, offset = tables.partition("+")
        if offset and not offset.isdecimal():
            raise ConfigError(f"--feature {name}: the offset must be a number, found '{offset}'")
        data = {
            "name": name,
            "table": table.split(",") if "," in table else table,
            "key_offset": int(offset or 0),
        }
        for option in options:
            data |= _feature_option(name, option)
        found.append(_feature(data))
    return found


def _feature_option(name: str, text: str) -> dict[str, Any]:
    """Parse one OPTION of --feature: the field that it sets, and its value."""
    option, _, value = text.partition("=")
    if option in get_args(Pooling) and not value:
        return {"pooling": option}
    if text == "context":
        return {"context": True}
    if text in ("keep_first", "keep_last"):
        return {"truncation": text}
    if option in ("hotness", "max_hotness", "max_length") and value.isdecimal():
        return {option: int(value)}
    raise ConfigError(f"--feature {name}: unknown option '{text}'; expected {FEATURE_OPTIONS}")


def defaults(values: Sequence[str] | None) -> dict[str, float | list[float]]:
    """Parse --default: ``TABLE=VALUE``, or ``TABLE=VALUE,VALUE...`` with a value per dimension."""
    found: dict[str, float | list[float]] = {}
    for table, text in pairs("--default", values, "TABLE=VALUE[,VALUE...]").items():
        try:
            numbers = [float(value) for value in text.split(",")]
        except ValueError:
            raise ConfigError(f"--default {table}: expected numbers, found '{text}'") from None
        found[table] = numbers if len(numbers) > 1 else numbers[0]
    return found


def row_formats(values: Sequence[str] | None, tables: Iterable[str]) -> dict[str, str]:
    """Parse --rows: ``FORMAT`` for all of ``tables``, or ``TABLE=FORMAT``, which precedes it; by table.

    Raises ConfigError."""
    texts, names = list(values or ()), list(tables)
    of_all = [text for text in texts if "=" not in text]
    if len(of_all) > 1:
        raise ConfigError(f"--rows names two formats for all tables: {' and '.join(of_all)}")
    single = pairs("--rows", [text for text in texts if "=" in text], "FORMAT or TABLE=FORMAT")
    for name in (*of_all, *single.values()):
        if name not in ROW_FORMAT_NAMES:
            hint = hint_for(name, ROW_FORMAT_NAMES, "the formats are")
            raise ConfigError(f"--rows: unknown format '{name}'{hint}")
    for table in single:
        if table not in names:
            hint = hint_for(table, names, "the tables are")
            raise ConfigError(f"--rows names table '{table}'{hint}")
    return {**{table: of_all[0] for table in names if of_all}, **single}


def _feature(data: dict[str, Any]) -> FeatureSpec:
    return validate(FeatureSpec, data, lambda _key: f"--feature {data['name']}")


def dense_spec(plan: ImportPlan, given: Sequence[FeatureSpec], path: Path) -> DenseSpec:
    """Build the `dense:` section from the network.

    Inputs with a feature's name receive its vectors; ``<feature>.mask`` and ``<feature>.lengths`` the mask
    and lengths of a padded feature. The others come with the request."""
    from hps.dense.onnx import OnnxModel

    stacked = [part for table in plan.tables for part, _ in table.parts]
    names = {name for feature in given for name in feature.vectors}
    names = names or {*stacked, *(t.name for t in plan.tables)}
    network = OnnxModel(path, "cpu")
    try:
        fed = {t.name for t in network.inputs}
        if unfed := sorted(names - fed):
            raise ModelError(
                f"{path}: no input is called like feature '{unfed[0]}'; its inputs are "
                f"{', '.join(sorted(fed))}. Name the features like them (--feature NAME=TABLE), or say in "
                "a model.yaml which input takes which feature (--spec)"
            )
        padded = [each.name for each in given if each.max_length is not None]
        masks = {name: f"{name}.mask" for name in padded if f"{name}.mask" in fed}
        lengths = {name: f"{name}.lengths" for name in padded if f"{name}.lengths" in fed}
        names |= {*masks.values(), *lengths.values()}
        return DenseSpec(
            inputs=[
                _tensor(t.name, t.datatype, t.shape) for t in network.inputs if t.name not in names
            ],
            masks=masks,
            lengths=lengths,
            outputs=[_tensor(t.name, t.datatype, t.shape) for t in network.outputs],
        )
    finally:
        network.close()


def _tensor(name: str, datatype: str, shape: Sequence[int]) -> TensorSpec:
    known: Datatype = datatype  # type: ignore[assignment] # TensorSpec checks it
    return TensorSpec(name=name, datatype=known, shape=list(shape))


def base_version(text: str) -> Base:
    """Parse --base. Raises ConfigError."""
    if text == "latest":
        return "latest"
    if text == "none":
        return "none"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--base {text}: expected a version number, latest or none")
    return int(text)


def watermark(values: Sequence[str] | None) -> dict[str, dict[str, int]]:
    """Parse --watermark: ``["t/0=5"]`` -> ``{"t": {"0": 5}}``. Raises ConfigError."""
    found: dict[str, dict[str, int]] = {}
    for stream, offset in pairs("--watermark", values, WATERMARK_FORM).items():
        topic, slash, partition = stream.rpartition("/")
        if not (slash and topic and _is_number(partition) and _is_number(offset)):
            raise ConfigError(f"--watermark {stream}={offset}: expected {WATERMARK_FORM}")
        partitions = found.setdefault(topic, {})
        if (number := str(int(partition))) in partitions:
            raise ConfigError(f"--watermark names '{topic}/{number}' twice")
        partitions[number] = int(offset)
    return found


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def rename_spec(spec: ModelSpec, name: str) -> ModelSpec:
    """Return ``spec`` with the imported model's name."""
    if spec.name == name:
        return spec
    return validate(ModelSpec, spec.model_dump() | {"name": name}, lambda _key: "--name")
