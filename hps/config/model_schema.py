"""``model.yaml``: what a model is made of. One field, one sentence; unknown keys are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

# HPS's own rule for model and table names (hier_parameter_server.cpp); safe in paths and URLs too.
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_\-]{1,120}$")]
# Tensor and feature names travel in JSON and in response parameters; a dot is reserved for
# `<feature>.offsets`, `.weights` and `.source`.
FeatureName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_\-]{1,120}$")]
TensorName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Datatype = Literal[
    "BOOL", "UINT8", "INT8", "INT16", "INT32", "INT64", "UINT16", "UINT32", "UINT64",
    "FP16", "FP32", "FP64",
]  # fmt: skip


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MissPolicySpec(Strict):
    """What happens to keys that no memory tier holds."""

    kind: Literal["wait", "default_then_promote"] = "wait"
    """`wait` asks the stores; `default_then_promote` answers with the default and promotes later."""
    min_hit_rate: float = Field(0.0, ge=0.0, le=1.0)
    """Under `default_then_promote`: a batch that finds a smaller share of its keys waits after all."""


class TableSpec(Strict):
    name: Name
    dim: int = Field(ge=1, le=65_536)
    dtype: Literal["float32", "float16"] = "float32"
    """The row's type in the tiers; files hold float32."""
    default: float | list[float] = 0.0
    """What an unknown key gets: one number, or `dim` of them."""
    miss_policy: MissPolicySpec = MissPolicySpec()
    tombstone_ttl_s: float = Field(86_400.0, ge=0)
    """How long a deletion is remembered, in seconds."""


class FeatureSpec(Strict):
    name: FeatureName
    table: Name
    key_offset: int = 0
    """Added (mod 2^64) to every key of this feature: several features can share one table."""
    pooling: Literal["sum", "mean", "none"] = "sum"
    """How a sample's vectors become one; `none` returns one vector per key."""
    hotness: int | None = Field(None, ge=1)
    """Keys per sample when it is fixed; None: anything the request brings, jagged included."""
    context: bool = False
    """May come with batch 1 and is then broadcast over the candidates of the other features."""


class TensorSpec(Strict):
    name: TensorName
    datatype: Datatype = "FP32"
    shape: list[int]
    """-1 is a variable dimension; the first one is the batch."""
    context: bool = False
    """Inputs only: may come with batch 1 and is then broadcast over the candidates."""


class DenseSpec(Strict):
    """The dense part, `dense.onnx` in the version's folder."""

    inputs: list[TensorSpec] = []
    """Tensors the request brings besides the features."""
    embeddings: dict[FeatureName, TensorName] = {}
    """Feature -> name of the network's input that takes its pooled vectors; default: the same name."""
    outputs: list[TensorSpec] = Field(min_length=1)
    ranking_output: TensorName | None = None
    """The output that `top_k` sorts by; default: the first."""


class ModelSpec(Strict):
    name: Name
    tables: list[TableSpec] = Field(min_length=1)
    features: list[FeatureSpec] = []
    """Default: one feature per table, with the table's name."""
    dense: DenseSpec | None = None
    max_batch_size: int = Field(65_536, ge=1)
    """Largest batch of one request."""
    preprocess: dict[str, Any] = {}
    """Reserved."""
