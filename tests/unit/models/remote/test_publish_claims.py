"""Publishers that are suspended longer than their claim lasts."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from hps.config.repository_uri import RepositoryUri
from hps.errors import ModelError
from hps.models.remote import publish as module
from hps.models.remote.arrow_store import ArrowStore
from hps.models.remote.publish import publish_remote
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.types import NoProgress
from tests.support.waiting import until
from tests.unit.models.conftest import spec

CLAIM_S = 6.0  # a busy machine may pause a publisher for seconds between two renewals
TABLES = [f"t{i}" for i in range(30)]
PUBLISH = f"""
import sys
from hps.config.repository_uri import RepositoryUri
from hps.models.remote import publish
from hps.models.remote.arrow_store import ArrowStore
from hps.models.repository import Repository
from hps.types import NoProgress
publish.CLAIM_S, publish._RENEW_S = {CLAIM_S}, 0.5
store = ArrowStore(RepositoryUri.parse(sys.argv[2]), 30.0)
publish.publish_remote(Repository(sys.argv[1]).open("ctr"), store, NoProgress(), parallel=1)
"""


def write(root, first):
    described = spec(**dict.fromkeys(TABLES, 4))
    rows = {t: (np.arange(100), np.full((100, 4), first, np.float32)) for t in TABLES}
    return write_version(root, described, 1, rows)


@pytest.fixture
def uri(s3, tmp_path):
    return RepositoryUri.parse(f"s3://bucket/{tmp_path.name}-claims")


def test_suspended_publisher_leaves_the_version_of_its_successor(uri, s3, tmp_path, monkeypatch):
    """Stopped in the middle of its files, while another one publishes other rows by the same number."""
    write(tmp_path / "first", 1.0)
    second = write(tmp_path / "second", 2.0)
    prefix = str(uri).removeprefix("s3://bucket/")
    command = [sys.executable, "-c", PUBLISH, str(tmp_path / "first"), str(uri)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: sum(f.endswith("emb_vector") for f in s3.files(prefix)) >= 3)
        os.kill(process.pid, signal.SIGSTOP)
        assert sum(f.endswith("emb_vector") for f in s3.files(prefix)) < len(TABLES) - 5
        time.sleep(CLAIM_S + 1.1)  # S3's times are in seconds
        monkeypatch.setattr(module, "CLAIM_S", CLAIM_S)
        monkeypatch.setattr(module, "_RENEW_S", 0.5)
        opened = Repository(tmp_path / "second").open("ctr")
        publish_remote(opened, ArrowStore(uri, 30.0), NoProgress())
        os.kill(process.pid, signal.SIGCONT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert "was suspended for more than 6 s" in errors
    assert "publish it again" in errors
    paths = [p.relative_to(second) for p in second.rglob("*") if p.is_file()]
    other = [p for p in paths if s3.read(f"{prefix}/ctr/1/{p}") != (second / p).read_bytes()]
    assert len(other) <= 1, "at most the file that was being uploaded"
    assert not [each for each in s3.files(prefix) if ".publish" in each], "no claim remains"


def test_claim_that_expired_by_the_stores_clock(uri, make_version, tmp_path, monkeypatch):
    """As after a pause of a virtual machine, whose clocks all stop: nothing becomes visible."""
    make_version(1)
    monkeypatch.setattr(module, "CLAIM_S", 2.0)
    monkeypatch.setattr(module, "_now", lambda: 1000.0)
    store = ArrowStore(uri, 30.0)

    class Pauses(NoProgress):
        def task(self, title, total, unit="rows"):
            time.sleep(3.1)
            return super().task(title, total, unit)

    opened = Repository(tmp_path / "models").open("ctr")
    with pytest.raises(ModelError, match=r"suspended for more than 2 s.*hps model verify ctr"):
        publish_remote(opened, store, Pauses())
    assert not store.exists("ctr/1/manifest.json")
    monkeypatch.setattr(module, "CLAIM_S", 120.0)  # a busy machine may need more than two seconds
    publish_remote(opened, store, NoProgress())
