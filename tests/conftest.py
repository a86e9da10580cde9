"""Fixtures that several suites share."""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings

from hps.cuda.loader import missing_requirement
from tests.support.fallbacks import HTTP_PROTOCOL
from tests.support.tiers import TIERS, TierUnderTest, open_case

# A machine that does something else at the moment is no failure.
settings.register_profile("hps", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hps")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slowest-files",
        type=int,
        default=0,
        metavar="N",
        help="Show the N files that took longest.",
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    count = config.getoption("--slowest-files")
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if count:
        terminalreporter.section(f"slowest {count} files")
        for file, duration in seconds.most_common(count):
            terminalreporter.write_line(f"{duration:6.1f} s  {file}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadgroup":
        return None
    from tests.support.scheduling import FilesThenAlone

    return FilesThenAlone(config, log)


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


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` without a CUDA device, and those marked `private_interface` on fallbacks; move
    those marked `alone` to the end if distributed.

    `make test-gpu` fails without a device.
    """
    if os.environ.get("PYTEST_XDIST_WORKER"):
        items.sort(key=lambda item: item.get_closest_marker("alone") is not None)
        for item in items:
            if item.get_closest_marker("alone"):
                item.add_marker(pytest.mark.xdist_group("alone"))
    for item in items:
        for mark in item.iter_markers("private_interface"):
            if HTTP_PROTOCOL != "auto":
                item.add_marker(pytest.mark.skip(reason=f"public interface: {mark.args[0]}"))
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
