"""A file that is being downloaded: its checksum while chunks arrive in any order, over restarts."""

import hashlib
import os
import threading

import numpy as np
import pytest

from hps.models.remote.partial_file import PartialFile, RemoteEntry

CHUNK = 1000
DATA = np.random.default_rng(1).bytes(10 * CHUNK + 7)
EXPECTED = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


def opened(folder, checksum=EXPECTED):
    return PartialFile(folder / "file", "file", RemoteEntry(len(DATA), checksum), CHUNK)


def part(chunk):
    return DATA[chunk * CHUNK : (chunk + 1) * CHUNK]


@pytest.fixture
def reads(monkeypatch):
    """Sizes of the reads of files, beside those of the log."""
    found, real = [], os.pread

    def pread(file, size, offset):
        found.append(size)
        return real(file, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    return found


def test_chunks_in_order_are_hashed_without_being_read_again(tmp_path, reads):
    file = opened(tmp_path)
    reads.clear()
    for chunk in range(file.chunks):
        assert file.write(chunk, part(chunk)) == (chunk == file.chunks - 1)
    assert file.checksum() == EXPECTED
    assert reads == []
    file.finish()
    file.close()
    assert (tmp_path / "file").read_bytes() == DATA


def test_order_of_chunks_does_not_matter(tmp_path):
    file = opened(tmp_path)
    for chunk in np.random.default_rng(2).permutation(file.chunks).tolist():
        file.write(chunk, part(chunk))
    assert file.checksum() == EXPECTED
    file.close()


def test_chunks_of_an_earlier_attempt_are_read(tmp_path):
    file = opened(tmp_path)
    for chunk in (0, 1, 5):
        file.write(chunk, part(chunk))
    file.close()
    file = opened(tmp_path)
    for chunk in file.missing():
        file.write(chunk, part(chunk))
    assert file.checksum() == EXPECTED
    file.close()


def test_restart_hashes_from_the_beginning(tmp_path):
    file = opened(tmp_path)
    for chunk in range(file.chunks):
        file.write(chunk, bytes(len(part(chunk))))
    assert file.checksum() != EXPECTED
    file.restart()
    assert len(file.missing()) == file.chunks
    for chunk in range(file.chunks):
        file.write(chunk, part(chunk))
    assert file.checksum() == EXPECTED
    file.close()


def test_threads_write_side_by_side(tmp_path):
    file = opened(tmp_path)
    threads = [
        threading.Thread(target=lambda i=i: [file.write(c, part(c)) for c in range(i, 11, 4)])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.checksum() == EXPECTED
    file.close()
