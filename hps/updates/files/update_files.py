"""Update files as batches: native messages, Parquet, npz. Faults are recorded, not raised."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hps.errors import BadRequest
from hps.native.twin_codec import HEADER, MAGIC
from hps.tiers.positions import StreamPosition, TableChanges
from hps.types import make_version
from hps.updates.codec import LONGEST, decode_native
from hps.updates.files.row_files import FORMATS, open_rows
from hps.updates.future_versions import drop_future_versions
from hps.updates.source import MESSAGE, DeadLetter, Reason, TableUpdate, UpdateBatch
from hps.updates.topics import NamedTables, misfit

log = logging.getLogger(__name__)

NATIVE = ".hpsu"
"""Suffix of files that hold native messages, one after the other."""
ENDINGS = (NATIVE, *FORMATS)
_BLOCK_BYTES = 32 << 20
_MAX_FAULTS = 1000
_SIZE, _UP, _DOWN = 5, 6, 7  # of HEADER's fields


class UpdateFile:
    """One file with updates of ``tables``, by `model/table`.

    ``block``: rows per batch at most, or one message; ``ahead_s``: see `hps.updates.future_versions`."""

    def __init__(self, path: Path, tables: NamedTables, block: int, ahead_s: float) -> None:
        self.path = path
        self.faults: list[str] = []
        """The first thousand faults found."""
        self._dead = 0
        self._tables = tables
        self._block = block
        self._ahead_s = ahead_s

    def report(self) -> str:
        """All faults, one per line."""
        more = self._dead - len(self.faults)
        lines = [*self.faults, *([f"and {more} more"] if more else [])]
        return "\n".join(lines) + "\n"

    def batches(self) -> Iterator[UpdateBatch]:
        """The file's batches. Never raises: an unreadable part is a dead letter and ends the file."""
        read = self._messages if self.path.suffix == NATIVE else self._rows
        try:
            yield from read()
        except FileNotFoundError:
            return  # removed by another process: no fault
        except (BadRequest, OSError) as error:
            yield UpdateBatch((), dead=[self._note(Reason.MALFORMED, str(error))])
        except Exception as error:  # an unforeseen fault must not stop the files after it
            log.exception("%s cannot be read", self.path)
            yield UpdateBatch((), dead=[self._note(Reason.MALFORMED, repr(error))])

    def _messages(self) -> Iterator[UpdateBatch]:
        """Native messages; each header has the message's length."""
        with self.path.open("rb") as file:
            places: list[int] = []
            payloads: list[bytes] = []
            rows = size = 0
            while head := file.read(HEADER.size):
                at = file.tell() - len(head)
                fields = HEADER.unpack(head) if len(head) == HEADER.size else None
                reason = _not_delimited(head, fields)
                if fields is None or reason is not None:
                    yield self._decoded(places, payloads)
                    yield UpdateBatch((), dead=[self._rest(reason or Reason.TRUNCATED, at)])
                    return
                places.append(at)
                payloads.append(head + file.read(fields[_SIZE] - HEADER.size))
                rows, size = rows + fields[_UP] + fields[_DOWN], size + len(payloads[-1])
                if rows >= self._block or size >= _BLOCK_BYTES:
                    yield self._decoded(places, payloads)
                    places, payloads, rows, size = [], [], 0, 0
            if payloads:
                yield self._decoded(places, payloads)

    def _decoded(self, places: Sequence[int], payloads: Sequence[bytes]) -> UpdateBatch:
        decoded = decode_native(payloads)
        faults = decoded.faults()
        updates = []
        for update in decoded.updates:
            fault = misfit(self._tables.get(update.table, ()), update)
            if fault is not None:
                faults += [(i, fault, 0) for i in update.numbers.tolist()]
                continue
            kept, ahead = drop_future_versions(update, self._ahead_s)
            faults += [(i, Reason.AHEAD, 0) for i in ahead]
            if kept is not None:
                updates.append(kept)
        dead = [
            self._note(why, f"byte {places[i] + at}: {_word(why)}", places[i], at, payloads[i])
            for i, why, at in sorted(faults)
        ]
        return UpdateBatch(updates, dead=dead)

    def _rows(self) -> Iterator[UpdateBatch]:
        path = self.path
        file = open_rows(path)
        name = file.table or _named(path)
        if name is None:
            raise BadRequest(
                f"{path} names no table: call it <model>.<table>.<anything>{path.suffix}"
            )
        event_ms = path.stat().st_mtime_ns // 1_000_000
        for changes in file.changes(self._block, make_version(event_ms)):
            update = _update(name, changes, event_ms)
            fault = misfit(self._tables.get(name, ()), update)
            if fault is not None:
                why = f"{_word(fault)}: {name}, dim {changes.dim}"
                yield UpdateBatch((), dead=[self._note(fault, why)])
                return
            kept, ahead = drop_future_versions(update, self._ahead_s)
            late = [self._note(Reason.AHEAD, f"{_word(Reason.AHEAD)}: {name}") for _ in ahead]
            yield UpdateBatch([] if kept is None else [kept], dead=late)

    def _rest(self, why: Reason, at: int) -> DeadLetter:
        return self._note(why, f"byte {at}: {_word(why)}; the rest was not read", at)

    def _note(
        self, why: Reason, text: str, at: int = 0, byte: int = 0, payload: bytes = b""
    ) -> DeadLetter:
        self._dead += 1
        if len(self.faults) < _MAX_FAULTS:
            self.faults.append(text)
        return DeadLetter(why, byte, StreamPosition(self.path.name, 0, at), payload)


def _named(path: Path) -> str | None:
    """The table in a file's name, `model/table`; None without one."""
    parts = path.name.split(".")
    return f"{parts[0]}/{parts[1]}" if len(parts) > 2 else None


def _not_delimited(head: bytes, fields: tuple[int, ...] | None) -> Reason | None:
    """Reason why a message's end is unknown, so that everything after it is lost; None if known."""
    if not MAGIC.startswith(head[: len(MAGIC)]):
        return Reason.BAD_MAGIC
    if fields is None or fields[_SIZE] < HEADER.size:
        return Reason.TRUNCATED
    return Reason.OVERSIZE if fields[_SIZE] > LONGEST else None


def _update(name: str, changes: TableChanges, event_ms: int) -> TableUpdate:
    message = np.zeros(1, MESSAGE)
    message["upserts"], message["deletes"] = len(changes.keys), len(changes.deleted)
    message["event_ms"] = event_ms
    return TableUpdate(name, changes, message, np.zeros(1, np.int64))


def _word(reason: Reason) -> str:
    return reason.name.lower()
