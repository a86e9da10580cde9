"""Mapped tables: the compiled reader and index builder against their NumPy twins and a dict."""

import os
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps import native as chosen
from hps.errors import ModelError
from hps.models.mapped_file import MappedOptions, write_mapped
from hps.models.tables import open_table
from hps.native import _core as native
from hps.native import mapped_format, twin_cache, twin_mapped, twin_misses, twin_pool
from hps.native.mapped_format import HEADER, HEADER_BYTES, open_mapped, read_header
from hps.row_format import row_format_of

KEY = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, -1, 2**63 - 1, -(2**63)])
ROW = st.sampled_from([(1, np.float16), (3, np.float32), (16, np.float32), (32, np.float32)])
KERNELS = st.sampled_from(native.cache_kernels())
VERSION, CODE = 77, 4
EXTREME = np.array([0, -1, 1, 2**63 - 1, -(2**63)], np.int64)


def written(folder, keys, dim=3, **options):
    """Write a table whose vector at row i is i, i + 1, ...; return its mapped file."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = np.asarray(keys, np.int64)
    keys.tofile(folder / "key")
    vectors(np.arange(len(keys)), dim).tofile(folder / "emb_vector")
    write_mapped(open_table(folder, "t", dim, None), folder / "mapped", MappedOptions(**options))
    return folder / "mapped"


def vectors(rows, dim):
    return (np.asarray(rows)[:, None] % 1000 + np.arange(dim)).astype(np.float32)


def bitmap_for(path):
    return np.zeros(native.bitmap_words(read_header(path).rows), np.uint64)


def open_twin(path, bitmap=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chosen, "MappedTable", twin_mapped.MappedTable)
        patch.setattr(chosen, "COMPILED", False)
        return open_mapped(path, VERSION, CODE, bitmap).table


def fetch(table, keys, dtype=np.float32, missing=None):
    n = len(keys)
    out, versions = np.full((n, table.dim), 7, dtype), np.full(n, 5, np.uint64)
    source = np.full(n, 9, np.uint8)
    missing = np.arange(n) if missing is None else missing
    left = table.fetch(keys, missing, out, versions, source)
    return SimpleNamespace(
        out=out,
        versions=versions,
        source=source,
        overridden=[] if left[0] is None else left[0].tolist(),
        absent=[] if left[1] is None else left[1].tolist(),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mapped")


@settings(deadline=None, max_examples=60)
@given(st.lists(KEY, max_size=200), st.lists(KEY, max_size=30), ROW, KERNELS, st.integers(0, 2**32))
def test_both_twins_answer_like_a_dict(folder, keys, others, row, kernels, seed):
    dim, dtype = row
    path = written(folder / "dict", keys, dim, row_format=row_format_of(dtype))
    last = {key: row for row, key in enumerate(keys)}
    bitmaps = [bitmap_for(path), bitmap_for(path)]
    tables = [
        open_mapped(path, VERSION, CODE, bitmaps[0], kernels).table,
        open_twin(path, bitmaps[1]),
    ]
    asked = np.array([*keys, *others], np.int64)
    asked = np.random.default_rng(seed).permutation(asked)
    marked = asked[: len(asked) // 4]
    known = np.array([key in last for key in asked.tolist()], bool)
    expected = vectors([last.get(key, 0) for key in asked.tolist()], dim).astype(dtype)
    for _ in range(2):
        found = [fetch(table, asked, dtype) for table in tables]
        overridden = known & np.isin(asked, marked) & (tables[0].overridden > 0)
        for each in found:
            assert each.absent == np.flatnonzero(~known).tolist()
            assert each.overridden == np.flatnonzero(overridden).tolist()
            answered = known & ~overridden
            assert (each.out[answered] == expected[answered]).all()
            assert (each.out[~answered] == 7).all()
            assert (each.versions == np.where(answered, VERSION, 5)).all()
            assert (each.source == np.where(answered, CODE, 9)).all()
        out = np.empty((len(asked), dim), dtype)
        assert [t.gather(asked, out) for t in tables] == [bool((known & ~overridden).all())] * 2
        positions = [t.positions(asked) for t in tables]
        assert (positions[0] == positions[1]).all()
        assert ((positions[0] >= 0) == known).all()
        present = {key for key in marked.tolist() if key in last}
        counts = [t.override_keys(marked) for t in tables]
        assert counts == [len(marked) - int(np.isin(marked, list(last)).sum())] * 2
        assert [t.overridden for t in tables] == [len(present)] * 2
        assert (bitmaps[0] == bitmaps[1]).all()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 400), st.integers(0, 2**63), st.sampled_from([1, 4, 40]))
def test_both_twins_build_the_same_index(n, seed, rare):
    keys = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, n)
    hashes = np.unique(native.index_hashes(keys, seed))
    assert (hashes == np.unique(twin_mapped.index_hashes(keys, seed))).all()
    # Many keys a bucket and no free slots, so that pilots are rare and buckets are evicted.
    buckets, slots = max(1, n // (3 + 40 // rare % 3)), n + n // 99 + rare
    built = [t.build_index_part(hashes, 0, buckets, buckets, slots) for t in (native, twin_mapped)]
    assert (built[0] is None) == (built[1] is None)
    if built[0] is not None:
        for ours, twins in zip(*built, strict=True):
            assert (ours == twins).all()
        assert sorted(built[0][1].tolist()) == list(range(len(hashes)))


@pytest.mark.parametrize("kernels", native.cache_kernels())
@pytest.mark.parametrize("dim", [1, 8, 16, 32, 33, 64, 128, 300])
def test_every_kernel_finds_the_rows_of_several_parts(folder, dim, kernels):
    keys = np.random.default_rng(dim).permutation(np.arange(70_000) * 2**24 - 2**40)
    path = folder / f"parts-{dim}" / "mapped"
    if not path.exists():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hps.models.mapped_file.PART_KEYS", 1 << 13)
            written(path.parent, keys, dim)
    mapped = open_mapped(path, VERSION, CODE, kernels=kernels)
    assert mapped.header.fields["n_parts"] > 8
    asked = np.arange(0, len(keys), 3)
    found = fetch(mapped.table, keys[asked])
    assert (found.out == vectors(asked, dim)).all()
    assert not found.absent
    mapped.table.threads = 2
    out = np.empty((len(keys), dim), np.float32)
    assert mapped.table.gather(keys, out)
    assert (out == vectors(np.arange(len(keys)), dim)).all()
    both = np.concatenate([keys, keys + 1])
    assert fetch(mapped.table, both).absent == list(range(len(keys), 2 * len(keys)))
    assert not mapped.table.gather(both, np.empty((len(both), dim), np.float32))
    assert mapped.damaged_blocks() == []


@pytest.mark.parametrize(
    "keys",
    [[], [0], EXTREME, np.arange(3000) << 32, np.arange(3000) << 48, np.arange(-3000, 3000)],
    ids=["none", "zero", "extreme", "stride 2^32", "stride 2^48", "consecutive"],
)
def test_special_sets_of_keys(folder, keys, request):
    keys = np.asarray(keys, np.int64)
    path = written(folder / request.node.name, keys)
    for table in (open_mapped(path, VERSION, CODE).table, open_twin(path)):
        found = fetch(table, keys)
        assert not found.absent
        assert (found.out == vectors(np.arange(len(keys)), 3)).all()
        others = np.setdiff1d(np.concatenate([EXTREME, np.arange(5000) * 7 + 3]), keys)
        assert len(fetch(table, others).absent) == len(others)


def test_missing_selects_the_keys_that_are_fetched(folder):
    table = open_mapped(written(folder / "missing", [5, 6, 7]), VERSION, CODE).table
    found = fetch(table, np.array([5, 9, 7, 6, 8]), missing=np.array([1, 2, 4]))
    assert found.absent == [1, 4]
    assert found.source.tolist() == [9, 9, CODE, 9, 9]
    with pytest.raises(ValueError, match="missing"):
        fetch(table, np.array([5]), missing=np.array([1]))
    with pytest.raises(ValueError, match="dtype and dim"):
        table.gather(np.array([5]), np.empty((1, 4), np.float32))


def test_a_read_only_bitmap_is_read_and_not_written(folder):
    path = written(folder / "read-only", np.arange(500))
    words = bitmap_for(path)
    owner = open_mapped(path, VERSION, CODE, words).table
    view = words.view()
    view.flags.writeable = False
    reader = open_mapped(path, VERSION, CODE, view).table
    assert owner.override_keys(np.array([3, 400, 1000, 3])) == 1
    assert fetch(reader, np.arange(500)).overridden == [3, 400]
    with pytest.raises(ValueError, match="no bitmap that can be written"):
        reader.override_keys(np.array([4]))
    with pytest.raises(ValueError, match="no bitmap that can be written"):
        open_mapped(path, VERSION, CODE).table.override_keys(np.array([4]))
    owner.clear_overrides()
    assert fetch(reader, np.arange(500)).overridden == []
    assert not words.any()
    with pytest.raises(ModelError, match="bitmap"):
        open_mapped(path, VERSION, CODE, np.zeros(3, np.uint64))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 700), max_size=40), max_size=20),
    ROW,
    KERNELS,
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_both_twins_pool_bags_alike(folder, bags, row, kernels, weighted, averaged, seed):
    dim, dtype = row
    path = folder / f"bags-{dim}" / "mapped"
    if not path.exists():
        written(path.parent, np.arange(600), dim, row_format=row_format_of(dtype))
    random = np.random.default_rng(seed)
    keys = np.array([key for bag in bags for key in bag], np.int64)
    offsets = np.cumsum([0, *map(len, bags)])
    weights = random.random(len(keys), np.float32) if weighted else None
    divisors = random.integers(0, 4, len(bags)).astype(np.float32) if averaged else None
    answers = []
    for table in (
        open_mapped(path, VERSION, CODE, bitmap_for(path), kernels).table,
        open_twin(path, bitmap_for(path)),
    ):
        table.override_keys(np.arange(500, 550))
        out = np.full((len(bags), dim), 3, dtype)
        missing = table.pool_bags(keys, offsets, weights, divisors, out)
        expected = np.flatnonzero((keys >= 600) | (keys >= 500) & (keys < 550))
        assert ([] if missing is None else missing.tolist()) == expected.tolist()
        if missing is not None:
            supplied = missing, vectors(missing, dim)
            assert table.pool_bags(keys, offsets, weights, divisors, out, supplied) is None
        answers.append(out)
    assert (answers[0].view(np.uint8) == answers[1].view(np.uint8)).all()


def test_a_long_bag_is_pooled_as_a_whole(folder):
    path = written(folder / "long", np.arange(9000), 16)
    keys = np.concatenate([np.arange(7000), np.arange(10)])
    offsets = np.array([0, 0, 3, 6990, 6990, 7010])
    outs = []
    for table in (open_mapped(path, VERSION, CODE).table, open_twin(path)):
        outs.append(np.empty((5, 16), np.float32))
        assert table.pool_bags(keys, offsets, None, None, outs[-1]) is None
    assert (outs[0] == outs[1]).all()


@pytest.mark.parametrize("core", [native, None], ids=["native", "twins"])
def test_gathers_of_several_tables_take_both_kinds(folder, core):
    path = written(folder / "kinds", np.arange(5000))
    like = np.empty((0, 3), np.float32)
    opened = open_twin if core is None else lambda *a: open_mapped(a[0], VERSION, CODE, a[1]).table
    cache_of, gather_all, gather_misses = (
        (twin_cache.CacheTable, twin_pool.gather_all, twin_misses.gather_misses)
        if core is None
        else (core.CacheTable, core.gather_all, core.gather_misses)
    )
    mapped, cache = opened(path, bitmap_for(path)), cache_of(100, like, "lru", 2)
    few = np.arange(50)
    cache.write(few, vectors(few, 3) + 1000, np.ones(50, np.uint64), 0, False)
    keys, tables = np.random.default_rng(1).integers(0, 5000, 20_000), {"m": mapped, "c": cache}
    outs = np.empty((len(keys), 3), np.float32), np.empty((50, 3), np.float32)
    assert gather_all(tables, [("m", keys, outs[0]), ("c", few, outs[1])], 2)
    assert (outs[0] == vectors(keys, 3)).all()
    assert (outs[1] == vectors(few, 3) + 1000).all()
    mapped.override_keys(np.array([7]))
    assert not gather_all(tables, [("m", np.array([6, 7]), outs[0][:2])])
    both = np.concatenate([np.array([6, 7, 5001]), few[:3]])
    rows, sources = np.zeros((6, 16), np.uint8), np.zeros(6, np.uint8)
    counts = np.zeros((2, 2), np.uint32)
    left = gather_misses(
        [mapped, cache], np.array([0, 3], np.uint32), both, np.arange(6, dtype=np.uint32),
        rows, sources, CODE, counts,
    )  # fmt: skip
    assert left == 2
    assert sources.tolist() == [CODE, 255, 255, CODE, CODE, CODE]
    assert counts.tolist() == [[3, 1], [3, 3]]
    assert (rows[0, :12].view(np.float32) == vectors([6], 3)[0]).all()
    assert (rows[3:, :12].copy().view(np.float32) == vectors(few[:3], 3) + 1000).all()


def test_readers_see_an_override_once_it_has_returned(folder):
    keys = np.random.default_rng(5).permutation(20_000)
    path = written(folder / "concurrent", keys)
    table = open_mapped(path, VERSION, CODE, bitmap_for(path)).table
    done, wrong = [0], []

    def read():
        out = np.empty((len(keys), 3), np.float32)
        versions, source = np.zeros(len(keys), np.uint64), np.zeros(len(keys), np.uint8)
        everything = np.arange(len(keys))
        while done[0] < len(keys):
            before = done[0]
            source[:] = 0
            overridden, absent = table.fetch(keys, everything, out, versions, source)
            marked = np.zeros(len(keys), bool)
            marked[[] if overridden is None else overridden] = True
            if absent is not None or not marked[:before].all() or (source[~marked] != CODE).any():
                wrong.append(before)
            if (out[~marked] != vectors(everything, 3)[~marked]).any():
                wrong.append(before)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for begin in range(0, len(keys), 50):
        table.override_keys(keys[begin : begin + 50])
        done[0] = begin + 50
    for reader in readers:
        reader.join()
    assert not wrong
    assert table.overridden == len(keys)


def change(path, offset, new):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(new)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda p: p.write_bytes(b""), "too few for its header"),
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "truncated"),
        (lambda p: p.write_bytes(p.read_bytes() + b"x"), "truncated"),
        (lambda p: p.write_bytes(b"\x89PNG" + bytes(5000)), "not a mapped table"),
        (lambda p: change(p, 0, bytes(HEADER_BYTES)), "did not finish"),
        (lambda p: change(p, 24, b"\xff"), "header is damaged"),
        (lambda p: change(p, 8, b"\x09"), "newer than"),
        (lambda p: p.unlink(), "No such file"),
    ],
)
def test_files_that_are_truncated_foreign_or_damaged_are_refused(folder, damage, text):
    path = written(folder / "refused", np.arange(100))
    damage(path)
    with pytest.raises(ModelError, match=text) as raised:
        open_mapped(path, VERSION, CODE)
    assert str(path) in str(raised.value)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 7 * 8), st.integers(1, 255))
def test_a_flipped_bit_is_found_and_reads_stay_in_the_file(folder, at, bits):
    path = written(folder / "flipped", np.arange(3000))
    data = bytearray(path.read_bytes())
    header = read_header(path)
    offset = HEADER_BYTES + at * (int(header.fields["bytes"]) - HEADER_BYTES - 1) // 56
    data[offset] ^= bits
    path.write_bytes(data)
    if offset >= header.fields["checksums"]:
        with pytest.raises(ModelError, match="checksums are damaged"):
            mapped_format.damaged_blocks(header)
    else:
        assert mapped_format.damaged_blocks(header) == [0]
    try:
        table = open_mapped(path, VERSION, CODE).table
    except ModelError:  # the parts of the index do not fit
        assert offset >= header.fields["parts"]
    else:
        fetch(table, np.arange(-100, 4000))


def test_populate_and_resident_follow_the_page_cache(folder):
    path = written(folder / "cold", np.arange(50_000), 32)
    mapped = open_mapped(path, VERSION, CODE)
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
    if mapped.resident() == 1:
        pytest.skip("the file system keeps files in memory")
    keys = np.arange(0, 50_000, 500)
    read = mapped.table.populate(keys)
    assert 0 < read <= 2 * len(keys)
    assert mapped.table.populate(keys) == 0
    assert (fetch(mapped.table, keys).out == vectors(keys, 32)).all()


def flags_of_mappings(path):
    """The flags of this process's mappings of a file, by the address at which each begins."""
    found, begin = {}, None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            begin = int(line.split("-")[0], 16) if line.endswith(f" {path}") else None
        elif line.startswith("VmFlags:") and begin is not None:
            found[begin] = line.split()[1:]
    return found


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no transparent huge pages"
)
def test_a_file_in_memory_asks_for_huge_pages(folder):
    path = written(folder / "huge", np.arange(50_000), 32)
    mapped = open_mapped(path, VERSION, CODE)
    flags = flags_of_mappings(path)
    assert flags
    assert all("hg" not in each for each in flags.values())
    mapped.table.load(0, path.stat().st_size)
    flags = flags_of_mappings(path)
    assert flags
    assert all("hg" in each for each in flags.values())


def test_a_fetch_reads_cold_pages_side_by_side(folder):
    path = written(folder / "cold-fetch", np.arange(50_000), 32)
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
    mapped = open_mapped(path, VERSION, CODE)
    if mapped.resident() > 0.5:
        pytest.skip("the file system keeps files in memory")
    keys = np.arange(0, 50_000, 50)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    assert (fetch(mapped.table, keys).out == vectors(keys, 32)).all()
    # Pages that were asked for ahead are being read, or in memory, when they are touched.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults < len(keys) / 2
    assert mapped.table.populate(keys) == 0


TRUNCATION = """
import faulthandler, os, signal, sys
if sys.argv[2] == "before": faulthandler.enable()
import numpy as np
from pathlib import Path
from hps.native.mapped_format import open_mapped
from hps.row_format import row_format_of
path = Path(sys.argv[1])
table = open_mapped(path, 1, 2).table
if sys.argv[2] == "after": faulthandler.enable(); other = open_mapped(path, 1, 2)
os.truncate(path, 8192)
keys = np.arange(20_000)
out = np.empty((len(keys), 3), np.float32)
unpooled = table.pool_bags(keys, None, None, None, out)
print("gathered", table.gather(keys, out), unpooled.tolist() == keys.tolist())
try:
    table.fetch(keys, keys, out, np.zeros(len(keys), np.uint64), np.zeros(len(keys), np.uint8))
except RuntimeError as error:
    print("raised", error, table.is_damaged, flush=True)
try:
    table.positions(keys)
except RuntimeError as error:
    print("again", flush=True)
if sys.argv[3] == "foreign":
    import mmap
    with open(path.with_name("other"), "w+b") as file:
        file.truncate(4096)
        mapping = mmap.mmap(file.fileno(), 4096)
        file.truncate(0)
        mapping[0]
elif sys.argv[3] == "sent":
    os.kill(os.getpid(), signal.SIGBUS)
"""


@pytest.mark.parametrize("faulthandler", ["off", "before", "after"])
@pytest.mark.parametrize("then", ["end", "foreign", "sent"])
def test_a_file_that_is_cut_short_does_not_end_the_process(tmp_path, faulthandler, then):
    path = written(tmp_path / "cut", np.arange(20_000))
    done = subprocess.run(
        [sys.executable, "-c", TRUNCATION, str(path), faulthandler, then],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "raised the mapped file could not be read" in done.stdout
    assert "gathered False True" in done.stdout
    assert "again" in done.stdout
    if then == "end":
        assert done.returncode == 0, done.stderr
    else:  # a SIGBUS of another mapping keeps its meaning
        assert done.returncode == -7
        assert ("Fatal Python error: Bus error" in done.stderr) == (faulthandler != "off")


def test_the_header_has_room_and_no_overlaps():
    ends = 0
    for name in HEADER.names:
        dtype, offset = HEADER.fields[name]
        assert offset >= ends
        ends = offset + dtype.itemsize
    assert ends == HEADER_BYTES
