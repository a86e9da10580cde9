"""Scores of recorded requests with tables in other row formats, and their AUC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.config import ModelSpec, Settings
from hps.config.config_errors import validate
from hps.errors import BadRequest, ModelError
from hps.models.repository import ModelVersion
from hps.models.version_writer import write_version
from hps.node.build import open as open_node
from hps.node.node import Node
from hps.types import EmbeddingTable, KeyArray, PredictRequest, VectorArray

Rows = tuple[KeyArray, VectorArray]


@dataclass(frozen=True, slots=True)
class RecordedRequests:
    """Requests, and the label 0 or 1 of each of their samples ``(n,)``, if they are known."""

    requests: Sequence[PredictRequest]
    labels: NDArray[np.bool_] | None

    def keys(self, spec: ModelSpec, tables: Mapping[str, EmbeddingTable]) -> dict[str, KeyArray]:
        """The distinct keys (n,) of the requests, ascending, by table."""
        found: dict[str, list[KeyArray]] = {name: [np.empty(0, np.int64)] for name in tables}
        for feature in spec.served_features:
            offset = np.array(feature.key_offset % 2**64, np.uint64).view(np.int64)
            for name in feature.tables:
                found[name] += [
                    tables[name].narrow(request.features[feature.name].keys + offset)
                    for request in self.requests
                ]
        return {name: np.unique(np.concatenate(keys)) for name, keys in found.items()}


class RowScorer:
    """Scores requests by a node of the model with the rows of their keys, in any row formats.

    The node is opened in this process, with mapped files in a temporary folder."""

    def __init__(
        self,
        version: ModelVersion,
        rows: Mapping[str, Rows],
        recorded: RecordedRequests,
        output: str | None = None,
    ) -> None:
        """``rows``: of the requests' keys in float32, by table. ``output``: the network's output to compare;
        by default the one that `top_k` sorts by. Raises ModelError if there is none of that name."""
        dense = version.spec.dense
        if dense is None or version.dense is None:
            raise ModelError(f"{version.key} has no network, so its requests have no scores")
        names = [tensor.name for tensor in dense.outputs]
        self.output = output or dense.ranking_output or names[0]
        if self.output not in names:
            raise ModelError(f"{version.key} has no output '{output}'; it has {', '.join(names)}")
        self._version, self._rows, self._recorded = version, rows, recorded

    def scores(self, formats: Mapping[str, str]) -> NDArray[np.float64]:
        """Return the scores (n,) with rows of the tables ``formats``, by name; others have float32."""
        with TemporaryDirectory(prefix="hps-rows-") as folder:
            dense = self._version.dense
            write_version(folder, self._spec(formats), 1, self._rows, dense=dense, base="none")
            tiers = {
                "rocksdb": {"enabled": False},
                "cpu_cache": {"enabled": False},
                "gpu": {"use": "off"},
            }
            data = {"models": {"repository": folder}, "tiers": tiers}
            with open_node(Settings.model_validate(data)) as node:
                return self._scored(node)

    def _scored(self, node: Node) -> NDArray[np.float64]:
        served = node.model(self._version.name)
        assert served.pipeline is not None  # the model has a network
        found = []
        for request in self._recorded.requests:
            asked = PredictRequest(served.keys(request.features), request.dense)
            found.append(self._one_a_sample(served.pipeline.predict(asked).outputs))
        return np.concatenate([np.empty(0), *found])

    def _spec(self, formats: Mapping[str, str]) -> ModelSpec:
        data = self._version.spec.model_dump()
        for table in data["tables"]:
            table["rows"] = formats.get(table["name"], "float32")
        return validate(ModelSpec, data, lambda _key: f"model '{self._version.name}'")

    def _one_a_sample(self, outputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
        scores = outputs[self.output]
        if scores.size != len(scores):
            raise ModelError(
                f"output '{self.output}' has {scores.size // max(len(scores), 1)} values a sample; scores "
                "that can be compared have one: name another output"
            )
        return scores.reshape(-1).astype(np.float64)


def auc(labels: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """Return the area under the ROC curve; equal scores count half. Raises BadRequest without both labels."""
    positive = int(np.count_nonzero(labels))
    negative = len(labels) - positive
    if not positive or not negative:
        raise BadRequest(
            "all labels are the same, but an AUC needs samples with label 0 and with 1"
        )
    _, place, times = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(times) - (times - 1) / 2)[place]
    below = float(rank[labels].sum()) - positive * (positive + 1) / 2
    return below / (positive * negative)
