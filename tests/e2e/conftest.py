"""The example, run on the real data: trained, published and served by a real server process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import hps
from benchmarks.peers.hps_server import Hps, start_hps
from examples.ctr.data import Samples, Split, read_csv, split
from examples.ctr.export import publish
from examples.ctr.training import DEFAULTS, Trained, train
from hps.node.node import Node
from tests.integration.conftest import triton_ready

__all__ = ["triton_ready"]


@dataclass(frozen=True)
class Example:
    """The trainer's test split and its ``scores[output] (n,)`` for it."""

    trained: Trained
    samples: Samples
    parts: Split
    test: Samples
    scores: dict[str, np.ndarray]

    @property
    def unknown(self) -> int:
        """Keys of the test split that have no row."""
        places = self.trained.vocabulary.places(self.test)
        return int((places == self.trained.vocabulary.first).sum())


@pytest.fixture(scope="session")
def example(shared_data: Path) -> Example:
    samples = read_csv(shared_data / "kdd12" / "Click_prediction_small.csv")
    parts = split(len(samples))
    trained = train(samples, parts, replace(DEFAULTS, epochs=3))
    test = samples.take(parts.test)
    return Example(trained, samples, parts, test, trained.score(test))


@pytest.fixture(scope="session")
def publish_example(example: Example) -> Callable[[Path], Path]:
    """Publishes the trained model into ``models`` of a folder; returns the version's folder."""
    return lambda folder: publish(example.trained, folder / "models")


@pytest.fixture(scope="session")
def published(
    publish_example: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with ``models``, the repository of the trained model; not to be changed."""
    folder = tmp_path_factory.mktemp("published")
    publish_example(folder)
    return folder


@pytest.fixture(scope="session")
def served(published: Path) -> Iterator[Hps]:
    """``hps serve`` on the trained model."""
    with start_hps(published) as server:
        yield server


@pytest.fixture(scope="session")
def node(published, tmp_path_factory) -> Iterator[Node]:
    """The same model opened without a server, with a database of its own and a cache that is too
    small for it."""
    database = tmp_path_factory.mktemp("library") / "rocksdb"
    settings = {
        "models": {"repository": str(published / "models")},
        "tiers": {"rocksdb": {"path": str(database)}, "cpu_cache": {"share": 0.2}},
    }
    with hps.open(settings) as opened:
        yield opened
