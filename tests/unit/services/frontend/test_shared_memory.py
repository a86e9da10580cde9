"""Regions that clients register, truncate and remove, and invalid ones."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from hps.errors import BadRequest, Forbidden, NotFound, Unsupported
from services.frontend import shared_memory as module
from services.frontend.errors import RequestTooLarge
from services.frontend.shared_memory import SharedMemoryRegistry
from services.frontend.shared_memory_refs import (
    SharedMemoryRef,
    SharedMemoryRefs,
    parse_reference,
    require_size,
)
from tests.support.waiting import until

HERE = "127.0.0.1"
INT64 = np.dtype(np.int64)


@pytest.fixture
def regions(tmp_path):
    return SharedMemoryRegistry(on=True, most_bytes=1000, folder=tmp_path)


@pytest.fixture
def numbers(tmp_path, regions):
    """A file of ten numbers; region ``r`` has all but the first."""
    path = tmp_path / "numbers"
    np.arange(10).tofile(path)
    regions.register("r", "/numbers", 8, 72, HERE)
    return path


def read_input(regions, ref, caller=HERE):
    return regions.take(SharedMemoryRefs({"f": (ref, INT64)}), caller)[0]["f"]


def targets(regions, ref):
    return regions.take(SharedMemoryRefs(outputs={"f": ref}), HERE)[1]


def put(regions, ref, array):
    return regions.put([("f", array), ("g", array)], targets(regions, ref))


def test_inputs_are_read_at_their_offsets(regions, numbers):
    found = read_input(regions, SharedMemoryRef("r", 16, 24))
    assert found.tolist() == [4, 5]
    assert read_input(regions, SharedMemoryRef("r", 72)).tolist() == [*range(1, 10)]
    assert read_input(regions, SharedMemoryRef("r", 0)).tolist() == []
    numbers.write_bytes(bytes(80))  # the request has a copy
    assert found.tolist() == [4, 5]


def test_outputs_are_written_at_their_targets(regions, numbers):
    strided = np.arange(-4, 0)[::2].reshape(2, 1)
    left = put(regions, SharedMemoryRef("r", 16, 8), strided)
    assert [(name, array.size) for name, array in left] == [("f", 0), ("g", 2)]
    assert np.fromfile(numbers, np.int64).tolist() == [0, 1, -4, -2, *range(4, 10)]
    put(regions, SharedMemoryRef("r", 16, 8), np.ones(1, np.float16))  # the target may be larger
    assert numbers.read_bytes()[16:18] == np.float16(1).tobytes()
    put(regions, SharedMemoryRef("r", 16), np.empty((0, 3), np.float32))
    with pytest.raises(BadRequest, match=r"\(8 bytes\) should be at least 16 bytes"):
        put(regions, SharedMemoryRef("r", 8), strided)


def test_registered_regions_are_listed(regions, numbers):
    expected = {"name": "r", "key": "/numbers", "offset": 8, "byte_size": 72}
    assert regions.status("", HERE) == regions.status("r", HERE) == [expected]
    regions.register("s", "numbers", 0, 80, HERE)  # with and without the slash
    assert [each["name"] for each in regions.status("", HERE)] == ["r", "s"]
    regions.unregister("r", HERE)
    regions.unregister("r", HERE)
    with pytest.raises(NotFound, match="Unable to find system shared memory region: 'r'"):
        regions.status("r", HERE)
    regions.unregister("", HERE)
    assert regions.status("", HERE) == []


def test_registry_is_off_or_for_clients_on_this_machine(tmp_path, regions, numbers):
    off = SharedMemoryRegistry(on=False, most_bytes=1000, folder=tmp_path)
    calls = (("register", ("r", "numbers", 0, 8)), ("unregister", ("",)), ("status", ("",)))
    for verb, arguments in calls:
        with pytest.raises(Unsupported, match=r"set server\.shared_memory"):
            getattr(off, verb)(*arguments, HERE)
        with pytest.raises(Forbidden, match="only for clients that connect by"):
            getattr(regions, verb)(*arguments, "10.0.0.9")
    with pytest.raises(
        BadRequest, match=r"'f': shared memory is not offered.*server\.shared_memory"
    ):
        read_input(off, SharedMemoryRef("r", 8))
    with pytest.raises(Forbidden, match=r"not for 10\.0\.0\.9"):
        read_input(regions, SharedMemoryRef("r", 8), "10.0.0.9")
    assert read_input(regions, SharedMemoryRef("r", 8), "::1").tolist() == [1]


def test_region_keys_name_only_files_of_shared_memory(tmp_path, regions, numbers):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/numbers").write_bytes(bytes(80))
    (tmp_path / "link").symlink_to(numbers)
    os.mkfifo(tmp_path / "pipe")
    for key in ("", "/", ".", "..", "../x", "folder/numbers", "//numbers", "a\0b", "x" * 256):
        with pytest.raises(BadRequest, match="must be a plain name"):
            regions.register("s", key, 0, 8, HERE)
    for key in ("link", "folder", "none"):
        with pytest.raises(BadRequest, match=f'Unable to open shared memory region: "{key}"'):
            regions.register("s", key, 0, 8, HERE)
    with pytest.raises(BadRequest, match="is not a shared memory file"):
        regions.register("s", "pipe", 0, 8, HERE)
    # Nor is a file accepted that takes a registered file's name later.
    numbers.rename(tmp_path / "other")
    with pytest.raises(BadRequest, match="No such file"):
        read_input(regions, SharedMemoryRef("r", 8))
    numbers.symlink_to(tmp_path / "other")
    with pytest.raises(BadRequest, match="Unable to open"):
        put(regions, SharedMemoryRef("r", 8), np.zeros(1))
    numbers.unlink()
    numbers.write_bytes(bytes(80))
    with pytest.raises(BadRequest, match="now names another file"):
        read_input(regions, SharedMemoryRef("r", 8))


def test_region_must_fit_in_its_file(regions, numbers):
    for offset, size in ((0, 81), (80, 1), (2**64 - 1, 2**64 - 1)):
        with pytest.raises(BadRequest, match=r"has 80 bytes, not"):
            regions.register("s", "numbers", offset, size, HERE)
    for offset, size in ((0, 0), (-1, 8)):
        with pytest.raises(BadRequest, match="'byte_size' must be positive"):
            regions.register("s", "numbers", offset, size, HERE)
    for ref in (
        SharedMemoryRef("r", 73),
        SharedMemoryRef("r", 8, 72),
        SharedMemoryRef("r", 2**63, 2**63),
    ):
        with pytest.raises(BadRequest, match="Invalid offset"):
            targets(regions, ref)
    with pytest.raises(NotFound, match="Unable to find shared memory region"):
        read_input(regions, SharedMemoryRef("none", 8))
    with pytest.raises(RequestTooLarge, match=r"at most 1000 are taken.*server\.max_body_bytes"):
        read_input(regions, SharedMemoryRef("r", 1008))


def test_truncated_file_is_an_error(regions, numbers):
    os.truncate(numbers, 20)
    for size in (16, 72):
        with pytest.raises(BadRequest, match="shorter than when it was registered"):
            read_input(regions, SharedMemoryRef("r", size))
        with pytest.raises(BadRequest, match="shorter than when it was registered"):
            put(regions, SharedMemoryRef("r", size), np.zeros(size // 8))
    assert numbers.stat().st_size == 20
    assert read_input(regions, SharedMemoryRef("r", 8)).tolist() == [1]


def test_number_and_names_of_regions_are_bounded(regions, numbers, monkeypatch):
    with pytest.raises(BadRequest, match="shared memory region 'r' already in manager"):
        regions.register("r", "numbers", 0, 8, HERE)
    for name in ("", "é" * 128):
        with pytest.raises(BadRequest, match="must have 1 to 255 bytes"):
            regions.register(name, "numbers", 0, 8, HERE)
    monkeypatch.setattr(module, "_MAX_REGIONS", 1)
    with pytest.raises(BadRequest, match="1 shared memory regions are registered"):
        regions.register("s", "numbers", 0, 8, HERE)


def test_late_answer_is_not_written_into_a_new_region_of_the_same_name(regions, numbers):
    """A client may hang up, unregister its region, and use the name for its next request."""
    earlier = targets(regions, SharedMemoryRef("r", 8))
    regions.unregister("r", HERE)
    regions.register("r", "/numbers", 8, 72, HERE)
    with pytest.raises(NotFound, match="'r' was unregistered meanwhile"):
        regions.put([("f", np.array([-1]))], earlier)
    put(regions, SharedMemoryRef("r", 8), np.array([-2]))
    assert np.fromfile(numbers, np.int64).tolist() == [0, -2, *range(2, 10)]


def test_unregister_waits_for_a_running_write(regions, numbers, monkeypatch):
    writing, going_on = threading.Event(), threading.Event()
    really = os.pwrite

    def pwrite(file, data, at):
        writing.set()
        assert going_on.wait(60)
        return really(file, data[:3], at)  # and it may write less than the size of its target

    monkeypatch.setattr(os, "pwrite", pwrite)
    writer = threading.Thread(target=put, args=(regions, SharedMemoryRef("r", 8), np.array([-1])))
    writer.start()
    assert writing.wait(60)
    end = threading.Thread(target=regions.unregister, args=("r", HERE))
    end.start()
    until(lambda: not regions.status("", HERE))
    assert end.is_alive()
    going_on.set()
    for thread in (writer, end):
        thread.join(60)
    assert np.fromfile(numbers, np.int64)[1] == -1
    with pytest.raises(NotFound):
        put(regions, SharedMemoryRef("r", 8), np.array([-1]))


def test_answer_to_a_removed_region_is_an_error(regions, numbers):
    earlier = targets(regions, SharedMemoryRef("r", 8))
    regions.unregister("r", HERE)
    with pytest.raises(NotFound, match="'r' was unregistered meanwhile"):
        regions.put([("f", np.array([-1]))], earlier)
    assert np.fromfile(numbers, np.int64)[1] == 1


def test_invalid_parameters_are_rejected():
    full = {"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": 16}
    ref = parse_reference("f", full)
    assert ref == SharedMemoryRef("r", 8, 16)
    assert ref.parameters == full
    assert "shared_memory_offset" not in SharedMemoryRef("r", 8).parameters
    for wrong in (
        {"shared_memory_region": 3},
        {"shared_memory_byte_size": None},
        {"shared_memory_offset": "0"},
        {"shared_memory_offset": True},
    ):
        with pytest.raises(BadRequest, match="'f': 'shared_memory_region' must be a string"):
            parse_reference("f", full | wrong)
    for name in ("shared_memory_byte_size", "shared_memory_offset"):
        with pytest.raises(BadRequest, match="must not be negative"):
            parse_reference("f", full | {name: -1})
    with pytest.raises(BadRequest, match="first two go together"):
        parse_reference("f", {"shared_memory_byte_size": 8})
    with pytest.raises(BadRequest, match=r"for model 'm'\. Expected 16, got 8"):
        require_size("f", ref, 16, "m")
