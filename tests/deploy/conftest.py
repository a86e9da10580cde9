"""Containers, for the tests marked so: `make test-compose` runs them, beside continuous integration."""

from __future__ import annotations

import os

import pytest

from tests.deploy.containers import Engine, lacking
from tests.support.kafka_brokers import need_kafka


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("containers")]
    reason = "run by `make test-compose`" if not os.environ.get("HPS_CONTAINERS") else lacking()
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def engine() -> Engine:
    """With our image as the working tree has it, and the stand-ins."""
    need_kafka()
    made = Engine()
    made.make_images()
    return made
