"""Schema of ``model.yaml``. One field, one sentence; unknown keys are rejected.

The docstring of a field is its description in ``hps config schema`` and in the docs. Rules that
span several fields are in ``model_checks.py`` and run whenever an object is built."""

from __future__ import annotations

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

from hps.config import model_checks
from hps.config.checks import ConfigFinding

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
            if isinstance(value, str) and "://" in value and Path in options:
                raise PydanticCustomError("remote_path", REMOTE_PATH)
        return value

    def consistent(self, findings: list[ConfigFinding]) -> Self:
        """Return self, or raise one error with all findings."""
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

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.consistent(model_checks.miss_policy(self.kind, self.min_hit_rate))


class TableSpec(StrictModel):
    """One embedding table."""

    name: Name
    """The table's name, also the name of its folder in the model repository."""
    dim: int = Field(ge=1, le=65_536)
    """Values per row."""
    dtype: Literal["float32", "float16"] = "float32"
    """The type of rows in the tiers; files hold float32."""
    key_dtype: Literal["int64", "uint32"] = "int64"
    """`uint32` keeps only the low 32 bits of every key, in files and in requests."""
    default: float | list[float] = 0.0
    """The vector of an unknown key: one number, or `dim` of them."""
    miss_policy: MissPolicySpec = MissPolicySpec()
    """Rule for keys that are not in memory."""
    tombstone_ttl_s: float = Field(86_400.0, ge=0)
    """Seconds for which a deletion is kept, so that an older row cannot come back."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.consistent(model_checks.default_vector(self.default, self.dim, self.dtype))


class FeatureSpec(StrictModel):
    """One categorical field of a request; its keys select rows of one or several tables."""

    name: FeatureName
    """The feature's name, also in requests."""
    table: Name | Annotated[list[Name], Field(min_length=1)]
    """The table of its keys, or a list of tables, whose vectors are named `<feature>.<table>`."""
    key_offset: int = Field(0, ge=-(2**63), le=2**64 - 1)
    """Added (mod 2^64) to every key of this feature, so that several features can share one table."""
    pooling: Literal["sum", "mean", "none"] = "sum"
    """Reduction of a sample's vectors to one; `none` returns one vector per key."""
    hotness: int | None = Field(None, ge=1)
    """Fixed number of keys per sample; null: any number, also a different one per sample."""
    max_hotness: int | None = Field(None, ge=1)
    """Largest number of keys per sample, averaged over a request; requests with more are rejected."""
    context: bool = False
    """May have batch 1, which is then broadcast over the candidates of the other features."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        findings = model_checks.hotness(self.hotness, self.max_hotness)
        return self.consistent(findings + model_checks.shared_keys(self.tables))

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

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.consistent(model_checks.shape(self.shape))


class DenseSpec(StrictModel):
    """The network, `dense.onnx` in the version's folder."""

    inputs: list[TensorSpec] = []
    """Tensors of a request in addition to the features."""
    embeddings: dict[VectorName, TensorName] = {}
    """Feature (`<feature>.<table>` where it has several) -> name of the network's input that takes its pooled
    vectors; default: the same name."""
    outputs: list[TensorSpec] = Field(min_length=1)
    """The network's outputs, in the order of the answer."""
    ranking_output: TensorName | None = None
    """The output that `top_k` sorts by; default: the first."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.consistent(
            model_checks.dense(
                [t.name for t in self.inputs],
                [t.name for t in self.outputs],
                self.embeddings,
                self.ranking_output,
            )
        )


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

    @model_validator(mode="after")
    def _check(self) -> Self:
        tables = [t.name for t in self.tables]
        findings = model_checks.names(tables, [(f.name, f.tables) for f in self.features])
        if self.dense is not None:
            findings += model_checks.wiring(
                [f.name for f in self.served_features],
                [vectors for f in self.served_features for vectors in f.vectors],
                [t.name for t in self.dense.inputs],
                self.dense.embeddings,
            )
        return self.consistent(findings)

    @property
    def served_features(self) -> list[FeatureSpec]:
        """``features``, or if empty, one per table with the table's name."""
        return self.features or [FeatureSpec(name=t.name, table=t.name) for t in self.tables]
