"""Containers, for the tests marked so: `make test-compose` runs them, and so does continuous integration."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.deploy.containers import Engine, missing_requirement
from tests.deploy.stack import Stack, import_clicks, started
from tests.integration.conftest import triton_ready
from tests.support.kafka_brokers import need_kafka

__all__ = ["triton_ready"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("containers")]
    reason = (
        "run by `make test-compose`"
        if not os.environ.get("HPS_CONTAINERS")
        else missing_requirement()
    )
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def engine(triton_ready: None) -> Engine:
    """With our image as the working tree has it, and stand-ins for those of others."""
    need_kafka()
    made = Engine()
    made.make_images()
    return made


@pytest.fixture(scope="session")
def stack(engine: Engine) -> Iterator[Stack]:
    with started(engine) as services:
        yield services


@pytest.fixture(scope="session")
def clicks(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a model of the tests, which the services serve in addition to the demo's."""
    import_clicks(stack, tmp_path_factory.mktemp("compose"))
    return "clicks"
