"""Schema of ``model.yaml``. One field, one sentence; unknown keys are rejected.

The docstring of a field is its description in ``hps config schema`` and in the docs. Rules that
span several fields are `StrictModel.violations`, and are checked whenever an object is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from hps.config.checks import ConfigFinding, duplicates, finding
from hps.config.repository_uri import RepositoryUri
from hps.suggestions import hint_for

# HPS's rule for model and table names (hier_parameter_server.cpp); also safe in paths and URLs.
NAME_PATTERN = r"^[a-zA-Z0-9_\-]{1,120}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
# Tensor and feature names occur in JSON and in response parameters; a dot is reserved for
# `<feature>.offsets`, `.weights` and `.source`.
FeatureName = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
VectorName = Annotated[
    str, StringConstraints(pattern=r"^[a-zA-Z0-9_\-]{1,120}(\.[a-zA-Z0-9_\-]{1,120})?$")
]
TensorName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Datatype = Literal[
    "BOOL", "UINT8", "INT8", "INT16", "INT32", "INT64", "UINT16", "UINT32", "UINT64",
    "FP16", "FP32", "FP64",
]  # fmt: skip


# As in hps/row_format.py, which takes NumPy's time to import.
RowFormatName = Literal["float32", "float16", "bfloat16", "float8_e4m3", "int8", "int4"]
FLOAT16_MAX = 65_504.0
# Suffixes of tensor names that the protocol adds to a feature's name.
RESERVED_SUFFIXES = (".offsets", ".weights", ".source")
PADDED_SUFFIXES = (".padded", ".mask")
"""The same for a feature with `max_length`."""
REMOTE_PATH = "remote locations are not supported; copy the files to a local folder"


class StrictModel(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _plausible(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject two mistakes that pydantic accepts: booleans as numbers, and remote paths."""
        if isinstance(value, bool | str) and info.field_name is not None:
            allowed = cls.model_fields[info.field_name].annotation
            options = get_args(allowed) or (allowed,)
            if isinstance(value, bool) and not {bool, Any} & set(options):
                raise PydanticCustomError("bool_not_allowed", "true and false are not numbers")
            remote = RepositoryUri in options
            if isinstance(value, str) and "://" in value and Path in options and not remote:
                raise PydanticCustomError("remote_path", REMOTE_PATH)
        return value

    def violations(self) -> Iterator[ConfigFinding]:
        """Violated rules that span several fields; each field is valid alone."""
        return iter(())

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        findings = list(self.violations())
        if findings:
            text = "; ".join(f.message for f in findings)
            raise PydanticCustomError(
                "inconsistent", "{text}", {"text": text, "findings": findings}
            )
        return self


class MissPolicySpec(StrictModel):
    """Rule for keys that are not in memory."""

    kind: Literal["wait", "default_then_promote"] = "wait"
    """`wait` fetches from the stores; `default_then_promote` answers with the default and promotes later."""
    min_hit_rate: float = Field(0.0, ge=0.0, le=1.0)
    """With `default_then_promote`: a batch with a smaller share of keys in memory waits for the stores."""

    def violations(self) -> Iterator[ConfigFinding]:
        if self.kind == "wait" and self.min_hit_rate > 0:
            message = f"needs kind default_then_promote, found {self.min_hit_rate:g} with kind wait"
            yield finding("min_hit_rate", message, "kind")


class TableSpec(StrictModel):
    """One embedding table."""

    name: Name
    """The table's name, also the name of its folder in the model repository."""
    dim: int = Field(ge=1, le=65_536)
    """Values per row."""
    dtype: Literal["float32", "float16"] = "float32"
    """The type of vectors in answers."""
    rows: RowFormatName | None = None
    """The format of rows in the tiers; default: `dtype`. Files hold float32."""
    key_dtype: Literal["int64", "uint32"] = "int64"
    """`uint32` keeps only the low 32 bits of every key, in files and in requests."""
    default: float | list[float] = 0.0
    """The vector of an unknown key: one number, or `dim` of them."""
    miss_policy: MissPolicySpec = MissPolicySpec()
    """Rule for keys that are not in memory."""
    tombstone_ttl_s: float = Field(86_400.0, ge=0)
    """Seconds for which a deletion is kept, so that an older row cannot come back."""
    ttl_s: float | None = Field(None, gt=0)
    """Seconds from its last write, or the publication of its file, after which a row expires in every tier;
    null: never."""

    def violations(self) -> Iterator[ConfigFinding]:
        values = self.default if isinstance(self.default, list) else [self.default]
        if isinstance(self.default, list) and len(values) != self.dim:
            expected = f"dim is {self.dim}; expected one number or {self.dim}"
            yield finding("default", f"has {len(values)} values, but {expected}", "dim")
        if self.dtype == "float16" and any(abs(v) > FLOAT16_MAX for v in values):
            message = f"does not fit float16, whose largest value is {FLOAT16_MAX:g}"
            yield finding("default", message, "dtype")

    @property
    def row_format(self) -> RowFormatName:
        """The format of rows in the tiers."""
        return self.rows or self.dtype


class FeatureSpec(StrictModel):
    """One categorical field of a request; its keys select rows of one or several tables."""

    name: FeatureName
    """The feature's name, also in requests."""
    table: Name | Annotated[list[Name], Field(min_length=1)]
    """The table of its keys, or a list of tables, whose vectors are named `<feature>.<table>`."""
    key_offset: int = Field(0, ge=-(2**63), le=2**64 - 1)
    """Added (mod 2^64) to every key of this feature, so that several features can share one table."""
    pooling: Literal["sum", "mean", "sqrtn", "none"] = "sum"
    """Reduction of a sample's vectors to one: `sqrtn` divides their sum by the square root of the sum of the
    squared weights, like TensorFlow; `none` returns one vector per key."""
    max_norm: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Rows whose l2 norm exceeds it are scaled down to it before pooling, like TensorFlow; null: no limit."""
    hotness: int | None = Field(None, ge=1)
    """Fixed number of keys per sample; null: any number, also a different one per sample."""
    max_hotness: int | None = Field(None, ge=1)
    """Largest number of keys per sample, averaged over a request; requests with more are rejected."""
    max_length: int | None = Field(None, ge=1, le=1_000_000)
    """With pooling `none`: pads the vectors of a sample to this number for the network, see `dense.masks`."""
    truncation: Literal["reject", "keep_first", "keep_last"] = "reject"
    """For samples with more than `max_length` keys: reject the request, or keep the first or last ones."""
    context: bool = False
    """May have batch 1, which is then broadcast over the candidates of the other features."""

    def violations(self) -> Iterator[ConfigFinding]:
        fixed, most = self.hotness, self.max_hotness
        if fixed is not None and most is not None and fixed > most:
            yield finding("max_hotness", f"is {most}, but hotness is {fixed}", "hotness")
        yield from self._padding()
        for i, table in enumerate(self.tables):
            if table in self.tables[:i]:
                yield ConfigFinding(("table", i), f"names table {table!r} twice")
            if len(self.tables) > 1 and f".{table}" in self.reserved_suffixes:
                vectors = f"vectors of table {table!r} would be named '<feature>.{table}'"
                yield ConfigFinding(("table", i), f"{vectors}, which is reserved")

    def _padding(self) -> Iterator[ConfigFinding]:
        if self.max_length is None:
            if self.truncation != "reject":
                yield finding(
                    "truncation", f"is {self.truncation}, but max_length is not set", "max_length"
                )
            return
        if self.pooling != "none":
            message = (
                f"pads vectors that are not pooled, but pooling is {self.pooling}; set it to none"
            )
            yield finding("max_length", message, "pooling")
        if self.hotness is not None:
            message = f"is for any number of keys per sample, but hotness is {self.hotness}; leave one out"
            yield finding("max_length", message, "hotness")

    @property
    def reserved_suffixes(self) -> tuple[str, ...]:
        """Suffixes that the protocol adds to the feature's name."""
        return RESERVED_SUFFIXES + (PADDED_SUFFIXES if self.max_length is not None else ())

    @property
    def tables(self) -> list[str]:
        """The tables of the feature's keys."""
        return self.table if isinstance(self.table, list) else [self.table]

    @property
    def vectors(self) -> dict[str, str]:
        """The feature's vectors: name -> table."""
        if len(self.tables) == 1:
            return {self.name: self.tables[0]}
        return {f"{self.name}.{table}": table for table in self.tables}


class TensorSpec(StrictModel):
    """An input or output of the network."""

    name: TensorName
    """The tensor's name in the network and in requests."""
    datatype: Datatype = "FP32"
    """Its type, as named in the Open Inference Protocol."""
    shape: list[int]
    """-1 is a variable dimension; the first one is the batch."""
    context: bool = False
    """Inputs only: may have batch 1, which is then broadcast over the candidates."""

    def violations(self) -> Iterator[ConfigFinding]:
        if not self.shape:
            yield finding("shape", "is empty; the first dimension is the batch, -1")
        for i, size in enumerate(self.shape):
            if size != -1 and size < 1:
                message = f"expected -1 or a number from 1, found {size}"
                yield ConfigFinding(("shape", i), message)


_FED = {
    "embeddings": "feature",
    "masks": "the mask of feature",
    "lengths": "the lengths of feature",
}


class DenseSpec(StrictModel):
    """The network, `dense.onnx` in the version's folder."""

    inputs: list[TensorSpec] = []
    """Tensors of a request in addition to the features."""
    embeddings: dict[VectorName, TensorName] = {}
    """Feature (`<feature>.<table>` where it has several) -> name of the network's input that takes its pooled
    vectors; default: the same name."""
    masks: dict[FeatureName, TensorName] = {}
    """Feature with `max_length` -> name of the network's input that takes the mask of its padded vectors,
    `[batch, max_length]`: 1 or true at keys, in the input's type."""
    lengths: dict[FeatureName, TensorName] = {}
    """Feature with `max_length` -> name of the network's input that takes its numbers of keys, `[batch]`."""
    outputs: list[TensorSpec] = Field(min_length=1)
    """The network's outputs, in the order of the answer."""
    ranking_output: TensorName | None = None
    """The output that `top_k` sorts by; default: the first."""

    def violations(self) -> Iterator[ConfigFinding]:
        outputs = [t.name for t in self.outputs]
        yield from duplicates([t.name for t in self.inputs], "inputs", "inputs")
        yield from duplicates(outputs, "outputs", "outputs")
        ranking = self.ranking_output
        if ranking is not None and ranking not in outputs:
            hint = hint_for(ranking, outputs, "the outputs are")
            yield finding(
                "ranking_output", f"is {ranking!r}, which is not an output{hint}", "outputs"
            )
        sources = dict.fromkeys([t.name for t in self.inputs], "an input of the request")
        for group, fed in _FED.items():
            for feature, target in getattr(self, group).items():
                if target in sources:
                    message = f"network input {target!r} already receives {sources[target]}"
                    yield ConfigFinding((group, feature), message)
                sources[target] = f"{fed} {feature!r}"


class ModelSpec(StrictModel):
    """A model: tables, features and the network."""

    name: Name
    """The model's name, also the name of its folder in the model repository."""
    tables: list[TableSpec] = Field(min_length=1)
    """The embedding tables."""
    features: list[FeatureSpec] = []
    """Default: one feature per table, with the table's name."""
    dense: DenseSpec | None = None
    """The network; a model without one answers embedding lookups only."""
    max_batch_size: int = Field(65_536, ge=1)
    """Largest batch of one request."""
    hps_version: int = Field(1, ge=1)
    """The version with HPS's own names in stores of layout `hps`; names of others have their number."""

    def violations(self) -> Iterator[ConfigFinding]:
        tables = [t.name for t in self.tables]
        yield from duplicates(tables, "tables", "tables")
        yield from duplicates([f.name for f in self.features], "features", "features")
        for i, feature in enumerate(self.features):
            for table in feature.tables:
                if table not in tables:
                    message = f"feature {feature.name!r} uses table {table!r}, which does not exist"
                    message += hint_for(table, tables, "the tables are")
                    yield ConfigFinding(("features", i, "table"), message, (("tables",),))
        if self.dense is not None:
            yield from self._wiring(self.dense)

    def _wiring(self, dense: DenseSpec) -> Iterator[ConfigFinding]:
        """Embeddings name existing vectors; no input has the name of a feature's tensor."""
        features = self.served_features
        vectors = [name for feature in features for name in feature.vectors]
        for name in dense.embeddings:
            if name not in vectors:
                message = f"names feature {name!r}, which does not exist"
                message += hint_for(name, vectors, "the features are")
                yield ConfigFinding(("dense", "embeddings", name), message, (("features",),))
        yield from _padded_inputs(dense, {f.name: f for f in features})
        names = {*(f.name for f in features), *vectors}
        reserved = {name + suffix for name in names for suffix in ("", *RESERVED_SUFFIXES)}
        for i, tensor in enumerate(dense.inputs):
            if tensor.name in reserved:
                message = f"input {tensor.name!r} has the name of a feature's tensor"
                yield ConfigFinding(("dense", "inputs", i, "name"), message)

    @property
    def served_features(self) -> list[FeatureSpec]:
        """``features``, or if empty, one per table with the table's name."""
        return self.features or [FeatureSpec(name=t.name, table=t.name) for t in self.tables]


def _padded_inputs(
    dense: DenseSpec, features: Mapping[str, FeatureSpec]
) -> Iterator[ConfigFinding]:
    """Masks and lengths are those of features with ``max_length``."""
    for group in ("masks", "lengths"):
        for name in getattr(dense, group):
            at = ("dense", group, name)
            if name not in features:
                message = f"names feature {name!r}, which does not exist"
                message += hint_for(name, features, "the features are")
                yield ConfigFinding(at, message, (("features",),))
            elif features[name].max_length is None:
                message = f"names feature {name!r}, which has no max_length"
                yield ConfigFinding(at, message, (("features",),))
