"""Repair of damaged tables: readable rows are kept, the files' rows replace others."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from hps.config.model_schema import ModelSpec, TableSpec
from hps.errors import TierError
from hps.models.loader import load_tables
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.rows.repair import repair_table
from hps.tiers.base import FetchContext, Part
from hps.tiers.positions import StreamPosition, TableChanges
from hps.tiers.rocksdb import RocksDbTier
from hps.tiers.rocksdb.repair import TableRepair
from hps.types import EmbeddingTable, NoProgress, version_now

DIM, ROWS = 64, 5000
NONE, NO_VERSIONS = np.empty(0, np.int64), np.empty(0, np.uint64)
CALLED, STREAMED = np.arange(0, 10), np.arange(ROWS, ROWS + 100)


def rows_of(keys: np.ndarray, value: float = 0.0) -> np.ndarray:
    return np.repeat(np.asarray(keys)[:, None] + np.float32(value), DIM, 1).astype(np.float32)


class World:
    """A model with tables ``items`` and ``others``, and a database of a layout, in a folder."""

    def __init__(self, folder: Path, layout: str) -> None:
        self.path, self.layout = folder / "db", layout
        self.version = Repository(folder / "models").open("m", 1)
        self.tables = self.version.embedding_tables()
        self.items, self.others = self.tables["items"], self.tables["others"]

    def open(self, **settings) -> RocksDbTier:
        return RocksDbTier(self.path, layout=self.layout, **settings)

    def largest(self, of: str = "items") -> Path:
        """The largest file of the table, from its load."""
        tier = self.open()
        data = tier._database.family(self.tables[of]).data
        files = [file["name"].lstrip("/") for file in data.live_files()]
        tier.close()
        found = [self.path / name for name in files if (self.path / name).stat().st_size > 1 << 20]
        return sorted(found)[0 if of == "items" else -1]

    def repair(self, *, loaded: bool = True):
        with_damage = self.open(on_lost_writes="repair")
        try:
            version = self.version if loaded else None
            return [
                repair_table(with_damage, table, version, NoProgress())
                for table in self.tables.values()
            ]
        finally:
            with_damage.close()


def make(folder: Path, layout: str) -> None:
    """Make a model and its database; of ``items`` some rows are updated, one is deleted, some added."""
    tables = [TableSpec(name=name, dim=DIM) for name in ("items", "others")]
    rows = {table.name: (np.arange(ROWS), rows_of(np.arange(ROWS))) for table in tables}
    write_version(folder / "models", ModelSpec(name="m", tables=tables), 1, rows)
    world = World(folder, layout)
    tier = world.open()
    load_tables(world.version, world.tables, tier, NoProgress())
    for keys in (CALLED, STREAMED):
        versions = np.full(len(keys), version_now(), np.uint64)
        changes = TableChanges(keys, rows_of(keys, 0.5), versions, NONE, NO_VERSIONS)
        tier.apply(world.items, changes, [StreamPosition("stream", 0, 7)])
    tier.delete(world.items, np.array([20]), np.array([version_now()], np.uint64))
    tier.close()


@pytest.fixture(scope="module")
def layout_folder(tmp_path_factory):
    """A function that returns the folder of a layout, made once."""
    found: dict[str, Path] = {}

    def folder(layout: str) -> Path:
        if layout not in found:
            found[layout] = tmp_path_factory.mktemp(layout)
            make(found[layout], layout)
        return found[layout]

    return folder


@pytest.fixture
def world(layout_folder, tmp_path):
    """A function that copies the folder of a layout."""

    def copy(layout: str = "native") -> World:
        return World(shutil.copytree(layout_folder(layout), tmp_path / "world"), layout)

    return copy


def fetch(tier: RocksDbTier, of: EmbeddingTable, keys: np.ndarray) -> Part:
    part, ctx = Part.make(of, keys, np.full((len(keys), DIM), -1, np.float32)), FetchContext()
    tier.fetch([part], ctx)
    assert ctx.degraded == []
    return part


def flip(file: Path, *places: int) -> None:
    with file.open("r+b") as opened:
        for at in places:
            opened.seek(at)
            byte = opened.read(1)[0]
            opened.seek(at)
            opened.write(bytes([byte ^ 1]))


DAMAGE = {
    "one block": lambda file: flip(file, 3000),
    "the first block": lambda file: flip(file, 10),
    "sixty places": lambda file: flip(file, *range(20_000, 1_220_000, 20_000)),
    "index": lambda file: flip(file, file.stat().st_size - 10_000),
    "cut": lambda file: os.truncate(file, 500_000),
    "empty": lambda file: os.truncate(file, 0),
    "gone": lambda file: file.unlink(),
}


@pytest.mark.parametrize(
    ("layout", "how"),
    [*[("native", how) for how in DAMAGE], ("hps", "sixty places"), ("hps", "gone")],
)
def test_repaired_table_has_every_row_of_the_files_and_all_that_could_be_read(world, layout, how):
    world = world(layout)
    DAMAGE[how](world.largest())
    saved, nothing = world.repair()
    assert nothing is None
    assert saved.streamed
    whole = how in ("index", "cut", "empty", "gone")
    assert (saved.lost > ROWS - 200) if whole else (0 <= saved.lost <= 7 * 60)
    tier = world.open()
    part = fetch(tier, world.items, np.arange(ROWS))
    assert (part.source > 0).sum() == ROWS - 1
    untouched = np.setdiff1d(np.arange(ROWS), [*CALLED, 20])
    assert (part.out[untouched] == rows_of(untouched)).all()
    if world.layout == "native":
        # They are in a newer, undamaged file.
        assert (part.out[CALLED] == rows_of(CALLED, 0.5)).all()
        assert (fetch(tier, world.items, STREAMED).out == rows_of(STREAMED, 0.5)).all()
        assert part.source[20] == 0
    assert tier.applied(world.items, "stream", 0) is None
    assert tier.streamed(world.items)
    assert tier.gaps(world.items) == []
    assert (fetch(tier, world.others, np.arange(ROWS)).source > 0).all()
    # An older update is still ignored.
    if world.layout == "native":
        old = np.full(len(CALLED), 5, np.uint64)
        tier.insert(world.items, CALLED, rows_of(CALLED, 0.25), old)
        assert (fetch(tier, world.items, CALLED).out == rows_of(CALLED, 0.5)).all()
    tier.close()
    assert world.repair() == [None, None]


@pytest.mark.parametrize("layout", ["native", "hps"])
def test_killed_repair_continues_when_repeated(world, monkeypatch, layout):
    world = world(layout)
    DAMAGE["sixty places"](world.largest())

    def killed(*_given):
        raise KeyboardInterrupt

    for step in ("finish", "put_back", "finish"):
        with monkeypatch.context() as patch:
            patch.setattr(TableRepair, step, killed)
            with pytest.raises(KeyboardInterrupt):
                world.repair()
        with pytest.raises(TierError, match="a repair was interrupted; run `hps store verify"):
            world.open()
    saved, _ = world.repair()
    assert saved.kept > ROWS - 7 * 60
    tier = world.open()
    assert (fetch(tier, world.items, STREAMED).source > 0).sum() > 90
    assert (fetch(tier, world.items, np.arange(ROWS)).source > 0).sum() == ROWS - 1
    tier.close()
    assert not (world.path / "hps-repair").exists()


def test_readable_rows_stay_without_the_files(world):
    world = world()
    DAMAGE["one block"](world.largest())
    saved, _ = world.repair(loaded=False)
    tier = world.open()
    found = (fetch(tier, world.items, np.arange(ROWS)).source > 0).sum()
    assert ROWS - 10 < found < ROWS - 1
    assert saved.kept >= found
    tier.close()


def test_both_tables_are_repaired(world):
    world = world()
    DAMAGE["one block"](world.largest())
    DAMAGE["gone"](world.largest("others"))
    items, others = world.repair()
    assert items.streamed
    assert not others.streamed
    tier = world.open()
    assert tier.loaded(world.others) is not None
    assert not tier.streamed(world.others)
    assert (fetch(tier, world.others, np.arange(ROWS)).source > 0).all()
    tier.close()
