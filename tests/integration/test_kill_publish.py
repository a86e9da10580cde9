"""``kill -9`` while versions with shared tables, deltas and updates are published: every version is whole."""

import random
import subprocess
import sys
import time

import numpy as np

from hps.config.model_schema import ModelSpec
from hps.models.check import check_version
from hps.models.derived_version import derive_dense_version
from hps.models.loader import load_tables
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.tiers.mapped import MappedTier
from hps.types import NoProgress, version_now

ROWS, KILLS = 5000, 12
SPEC = {
    "name": "m",
    "tables": [{"name": "users", "dim": 8}, {"name": "items", "dim": 4}],
    "dense": {"outputs": [{"name": "y", "shape": [-1]}]},
}
SCRIPT = """
import sys
import numpy as np
from hps.config.model_schema import ModelSpec
from hps.models.compaction import compact_version
from hps.models.derived_version import derive_dense_version
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.tiers.mapped import MappedTier
from hps.types import NoProgress

root, database, spec = sys.argv[1], sys.argv[2], ModelSpec.model_validate(eval(sys.argv[3]))
store = MappedTier(database, access="read_only")
print("ready", flush=True)
while True:
    derive_dense_version(root, "m", b"net")
    compact_version(Repository(root).open("m", 1), store, NoProgress())
    files = Repository(root).open("m", 1).tables
    tables = {name: (each.keys(), each.vectors()) for name, each in files.items()}
    version = Repository(root).versions("m")[-1] + 1
    tables["users"][1][: version % 50] += version
    write_version(root, spec, version, tables, dense=b"net", base=1)
"""


def test_every_version_is_whole(tmp_path):
    root, spec, keys = tmp_path / "models", ModelSpec.model_validate(SPEC), np.arange(ROWS)
    tables = {t.name: (keys, np.ones((ROWS, t.dim), np.float32)) for t in spec.tables}
    write_version(root, spec, 1, tables, dense=b"net")
    opened = Repository(root).open("m")
    served = opened.embedding_tables()
    store = MappedTier(tmp_path / "db")
    load_tables(opened, served, store, NoProgress())
    now = np.full(20, version_now(), np.uint64)
    store.insert(served["users"], keys[:20], np.full((20, 8), 5, np.float32), now)
    store.close()
    command = [sys.executable, "-c", SCRIPT, str(root), str(tmp_path / "db"), repr(SPEC)]
    checked = set()
    for _ in range(KILLS):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as publisher:
            assert publisher.stdout.readline() == b"ready\n"
            time.sleep(random.uniform(0, 0.3))
            publisher.kill()
        for version in set(Repository(root).versions("m")) - checked:
            findings = list(check_version(Repository(root).open("m", version), NoProgress()))
            assert {each.level for each in findings} == {"OK"}, findings
            checked.add(version)
    assert len(checked) > KILLS
    derive_dense_version(root, "m", b"last")
    assert not list((root / "m").glob(".import-*"))
