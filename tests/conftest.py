"""Fixtures that several suites share."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings

from hps.cuda.loader import missing_requirement
from tests.support.tiers import TIERS, TierUnderTest, open_case

# A machine that does something else at the moment is no failure.
settings.register_profile("hps", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hps")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets: ``HPS_SHARED_DATA``, else ``../shared/data`` beside the
    repository. Without it a test is skipped, but fails where ``CI`` is set."""
    stated = os.environ.get("HPS_SHARED_DATA")
    folder = Path(stated) if stated else Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        _lack(f"no data sets in {folder}; point HPS_SHARED_DATA to them")
    return folder


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """``program("redis-server")`` is its path. A test whose program is not installed is skipped, but
    fails where ``CI`` is set."""

    def find(name: str) -> str:
        return shutil.which(name) or _lack(f"{name} is not installed: run `make test-services`")

    return find


def _lack(message: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is no CUDA device; `make test-gpu` fails there."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := missing_requirement()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


# -- every tier ------------------------------------------------------------------------------------


def named(names: Iterable[str]) -> list[Any]:
    """Parameters for fixtures; those that need a CUDA device are marked."""
    return [pytest.param(n, marks=[pytest.mark.gpu] if n.startswith("gpu") else []) for n in names]


EVERY = named(TIERS)
VERSIONED = named(name for name, case in TIERS.items() if case.versioned)

OpenTier = Callable[[Path], TierUnderTest]


@pytest.fixture(params=EVERY)
def under_test(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierUnderTest]:
    """Every tier, one after the other."""
    opened = open_case(request.param, tmp_path)
    yield opened
    opened.tier.close()


@pytest.fixture(params=VERSIONED)
def versioned(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierUnderTest]:
    """Every tier that keeps versions and tombstones."""
    opened = open_case(request.param, tmp_path)
    yield opened
    opened.tier.close()


@pytest.fixture(params=EVERY)
def open_tier(request: pytest.FixtureRequest) -> OpenTier:
    """Makes one kind of tier again and again, each time in the given empty folder."""
    return lambda path: open_case(request.param, path)
