"""Fixtures that several suites share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets: ``HPS_SHARED_DATA``, else ``../shared/data`` beside the
    repository. Without it a test is skipped, but fails where ``CI`` is set."""
    stated = os.environ.get("HPS_SHARED_DATA")
    folder = Path(stated) if stated else Path(__file__).parents[2] / "shared" / "data"
    if folder.is_dir():
        return folder
    message = f"no data sets in {folder}; point HPS_SHARED_DATA to them"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
