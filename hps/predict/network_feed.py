"""Network feed: a network's inputs on the host, from a lookup's vectors."""

from __future__ import annotations

from collections.abc import Mapping

from hps.config.model_schema import DenseSpec
from hps.dense.base import DenseModel
from hps.lookup.base import Feature
from hps.lookup.padding import lengths, mask, pad
from hps.predict.checks import Arrays, broadcast_batch
from hps.predict.network_inputs import check_wiring, length_tensors, mask_tensors
from hps.types import JaggedKeys, VectorArray


class NetworkFeed:
    """Makes the inputs of one network. Thread-safe."""

    def __init__(
        self, model: str, spec: DenseSpec, features: Mapping[str, Feature], network: DenseModel
    ) -> None:
        """Raises ``ModelError`` if the network and its specification do not match."""
        fed = check_wiring(model, spec, features, network)
        taken = {tensor.name: tensor.dtype for tensor in network.inputs}
        named = [
            (feature, spec.embeddings.get(feature.name, feature.name))
            for feature in features.values()
        ]
        # The type to which vectors are converted; None: as they are.
        self._vectors = [
            (feature, tensor, None if fed[tensor].dtype == taken[tensor] else taken[tensor])
            for feature, tensor in named
        ]
        self._masks = [
            (feature.name, tensor.shape[1], tensor.name, taken[tensor.name])
            for feature, tensor in mask_tensors(model, spec, features)
        ]
        self._lengths = [
            (feature.name, tensor.name, taken[tensor.name])
            for feature, tensor in length_tensors(model, spec, features)
        ]

    def __call__(
        self,
        inputs: Arrays,
        keys: Mapping[str, JaggedKeys],
        vectors: Mapping[str, VectorArray],
        batch: int,
    ) -> Arrays:
        """Return all inputs: contiguous arrays of the network's types with the full ``batch``.

        ``inputs (batch, ...)`` are the dense ones; ``keys`` those that were looked up, at most ``max_length``
        a sample where vectors are padded."""
        feed = dict(inputs)
        for feature, tensor, dtype in self._vectors:
            array = vectors[feature.name]
            if dtype is not None:
                array = array.astype(dtype)
            if feature.max_length is not None:
                array = pad(array, keys[feature.name], feature.max_length)
            elif feature.pooling == "none":
                array = array.reshape(-1, feature.hotness or 1, feature.table.dim)
            feed[tensor] = broadcast_batch(array, batch)
        for name, length, tensor, taken in self._masks:
            at_keys = mask(keys[name], length).astype(taken, copy=False)
            feed[tensor] = broadcast_batch(at_keys, batch)
        for name, tensor, taken in self._lengths:
            feed[tensor] = broadcast_batch(lengths(keys[name]).astype(taken, copy=False), batch)
        return feed
