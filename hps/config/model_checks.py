"""Rules that span several fields of ``model.yaml``, like those of ``checks.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hps.config.checks import ConfigFinding, duplicates
from hps.suggestions import hint_for

FLOAT16_MAX = 65_504.0
# Suffixes of tensor names that the protocol adds to a feature's name.
RESERVED_SUFFIXES = (".offsets", ".weights", ".source")


def miss_policy(kind: str, min_hit_rate: float) -> list[ConfigFinding]:
    if kind == "wait" and min_hit_rate > 0:
        message = f"needs kind default_then_promote, found {min_hit_rate:g} with kind wait"
        return [ConfigFinding(("min_hit_rate",), message, (("kind",),))]
    return []


def default_vector(default: float | list[float], dim: int, dtype: str) -> list[ConfigFinding]:
    findings = []
    values = default if isinstance(default, list) else [default]
    if isinstance(default, list) and len(default) != dim:
        message = f"has {len(default)} values, but dim is {dim}; expected one number or {dim}"
        findings.append(ConfigFinding(("default",), message, (("dim",),)))
    if dtype == "float16" and any(abs(v) > FLOAT16_MAX for v in values):
        message = f"does not fit float16, whose largest value is {FLOAT16_MAX:g}"
        findings.append(ConfigFinding(("default",), message, (("dtype",),)))
    return findings


def hotness(fixed: int | None, most: int | None) -> list[ConfigFinding]:
    if fixed is not None and most is not None and fixed > most:
        message = f"is {most}, but hotness is {fixed}"
        return [ConfigFinding(("max_hotness",), message, (("hotness",),))]
    return []


def shape(dims: Sequence[int]) -> list[ConfigFinding]:
    if not dims:
        return [ConfigFinding(("shape",), "is empty; the first dimension is the batch, -1")]
    return [
        ConfigFinding(("shape", i), f"expected -1 or a number from 1, found {d}")
        for i, d in enumerate(dims)
        if d != -1 and d < 1
    ]


def shared_keys(tables: Sequence[str]) -> list[ConfigFinding]:
    """Tables of one feature are distinct, and none has a name that the protocol reserves."""
    findings = []
    for i, table in enumerate(tables):
        if table in tables[:i]:
            findings.append(ConfigFinding(("table", i), f"names table {table!r} twice"))
        if len(tables) > 1 and f".{table}" in RESERVED_SUFFIXES:
            message = (
                f"vectors of table {table!r} would be named '<feature>.{table}', which is reserved"
            )
            findings.append(ConfigFinding(("table", i), message))
    return findings


def names(
    tables: Sequence[str], features: Sequence[tuple[str, Sequence[str]]]
) -> list[ConfigFinding]:
    """Names are unique, and every feature's tables exist."""
    findings = duplicates(tables, "tables", "tables")
    findings += duplicates([name for name, _ in features], "features", "features")
    for i, (name, used) in enumerate(features):
        for table in used:
            if table not in tables:
                message = f"feature {name!r} uses table {table!r}, which does not exist"
                message += hint_for(table, tables, "the tables are")
                findings.append(ConfigFinding(("features", i, "table"), message, (("tables",),)))
    return findings


def dense(
    inputs: Sequence[str],
    outputs: Sequence[str],
    embeddings: Mapping[str, str],
    ranking_output: str | None,
) -> list[ConfigFinding]:
    findings = duplicates(inputs, "inputs", "inputs") + duplicates(outputs, "outputs", "outputs")
    if ranking_output is not None and ranking_output not in outputs:
        message = f"is {ranking_output!r}, which is not an output"
        message += hint_for(ranking_output, outputs, "the outputs are")
        findings.append(ConfigFinding(("ranking_output",), message, (("outputs",),)))
    sources = dict.fromkeys(inputs, "an input of the request")
    for feature, target in embeddings.items():
        if target in sources:
            message = f"network input {target!r} already receives {sources[target]}"
            findings.append(ConfigFinding(("embeddings", feature), message))
        sources[target] = f"feature {feature!r}"
    return findings


def wiring(
    features: Sequence[str],
    vectors: Sequence[str],
    inputs: Sequence[str],
    embeddings: Mapping[str, str],
) -> list[ConfigFinding]:
    """Embeddings name existing vectors; no input has the name of a feature's tensor."""
    findings = []
    for name in embeddings:
        if name not in vectors:
            message = f"names feature {name!r}, which does not exist"
            message += hint_for(name, vectors, "the features are")
            findings.append(ConfigFinding(("dense", "embeddings", name), message, (("features",),)))
    names = {*features, *vectors}
    reserved = {name + suffix for name in names for suffix in ("", *RESERVED_SUFFIXES)}
    for i, name in enumerate(inputs):
        if name in reserved:
            message = f"input {name!r} has the name of a feature's tensor"
            findings.append(ConfigFinding(("dense", "inputs", i, "name"), message))
    return findings
