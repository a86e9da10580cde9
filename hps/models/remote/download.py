"""Parallel, resumable download of a version's files, checked by size and by checksum."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from hps.backoff import Backoff
from hps.errors import ModelError
from hps.models.remote.partial_file import PartialFile
from hps.models.remote.store import RemoteFile, StoreUnavailable

log = logging.getLogger(__name__)

OpenFile = Callable[[str, bool], RemoteFile]
"""Opens a path; the flag says that the file is downloaded for the second time."""
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """How a version is downloaded; see `DownloadSettings`. ``backoff``: pauses between attempts."""

    parallel: int = 8
    chunk_bytes: int = 8 << 20
    attempts: int = 5
    mapped: bool = True
    backoff: Backoff = field(default_factory=lambda: Backoff(0.2, 10.0))


@dataclass(slots=True)
class _FileState:
    """A file that is being downloaded; ``repeated``: for the second time."""

    partial: PartialFile
    repeated: bool = False


_Job = tuple[_FileState, int | None]
"""A chunk of a file to download; None: check the whole file."""


class VersionDownload:
    """Download of some files by a number of threads. Used once, by one thread.

    ``where``: prefix of the files' paths in error messages. ``distrust`` gets the path of a file that does
    not match its checksum, before that is downloaded again."""

    def __init__(
        self,
        where: str,
        open_file: OpenFile,
        limits: DownloadLimits,
        distrust: Callable[[str], None] = lambda _path: None,
    ) -> None:
        self._where = where
        self._open_file, self._distrust = open_file, distrust
        self._limits = limits
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._events: SimpleQueue[int | Exception] = SimpleQueue()
        self._stop = threading.Event()
        self._readers: dict[tuple[str, bool], RemoteFile] = {}
        self._lock = threading.Lock()

    def run(self, files: Sequence[PartialFile], advance: Callable[[int], None]) -> None:
        """Download what is missing of ``files``, check and name them; calls ``advance`` with bytes.

        An exception of ``advance`` cancels the download. Raises ModelError, StoreUnavailable and
        OSError of the local disk; the complete chunks remain for the next attempt."""
        jobs = [job for file in files for job in _jobs_of(_FileState(file))]
        for job in jobs:
            self._jobs.put(job)
        count = max(1, min(self._limits.parallel, len(jobs)))
        threads = [
            threading.Thread(target=self._work, name=f"hps-download-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in threads:
            thread.start()
        try:
            self._wait(len(files), advance)
        finally:
            self._stop.set()
            for _ in threads:
                self._jobs.put(None)
            for thread in threads:
                thread.join()
            for reader in self._readers.values():
                reader.close()

    def _wait(self, files: int, advance: Callable[[int], None]) -> None:
        """Pass on progress until every file is complete; a file's end is the event -1."""
        while files:
            try:
                event = self._events.get(timeout=_POLL_S)
            except Empty:
                event = 0
            if isinstance(event, Exception):
                raise event
            if event < 0:
                files -= 1
            else:
                advance(event)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._stop.is_set():
            file, chunk = job
            try:
                if chunk is None or self._fetch(file, chunk):
                    self._check(file)
            except Exception as error:
                self._events.put(error)
                return

    def _fetch(self, file: _FileState, chunk: int) -> bool:
        """Download a chunk; True if it was the file's last one missing."""
        partial = file.partial
        offset, size = partial.range_of(chunk)
        data = self._read((partial.relative, file.repeated), size, offset)
        if len(data) != size:
            raise ModelError(
                f"{self._where}/{partial.relative}: the manifest says {partial.entry.bytes} bytes, but "
                f"the file ends at {offset + len(data)}; it was replaced: publish the version again"
            )
        is_last = partial.write(chunk, data)
        self._events.put(size)
        return is_last

    def _read(self, file: tuple[str, bool], size: int, offset: int) -> bytes:
        """Read a range, with repeated attempts while the store is unavailable."""
        failures = 0
        while True:
            try:
                return self._reader(file).read_at(size, offset)
            except StoreUnavailable as error:
                failures += 1
                if failures >= self._limits.attempts or self._stop.is_set():
                    raise
                pause_s = self._limits.backoff.pause_s(failures)
                log.warning("download: retrying in %.1f s: %s", pause_s, error)
                self._stop.wait(pause_s)

    def _reader(self, file: tuple[str, bool]) -> RemoteFile:
        with self._lock:
            if file not in self._readers:
                self._readers[file] = self._open_file(*file)
            return self._readers[file]

    def _check(self, file: _FileState) -> None:
        """Compare the checksum; download the file once more if it differs."""
        partial = file.partial
        expected = partial.entry.checksum
        found = None if expected is None else partial.checksum()
        if found == expected:
            partial.finish()
            self._events.put(-1)
        elif not file.repeated:
            log.warning(
                "download: %s/%s does not match its checksum; downloading it again",
                self._where,
                partial.relative,
            )
            self._distrust(partial.relative)
            partial.restart()
            for job in _jobs_of(_FileState(partial, repeated=True)):
                self._jobs.put(job)
        else:
            partial.restart()
            raise ModelError(
                f"{self._where}/{partial.relative}: the contents do not match the manifest (expected "
                f"{expected}, found {found}, downloaded twice); the file in the repository was damaged or "
                "replaced: publish the version again"
            )


def _jobs_of(file: _FileState) -> Iterable[_Job]:
    missing = file.partial.missing()
    return [(file, chunk) for chunk in missing] or [(file, None)]
