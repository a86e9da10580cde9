"""Staging: a version appears in a model repository completely or not at all.

It is written to a hidden folder next to its final place and then renamed. The writer locks the hidden
folder while it runs, so the next writer detects and removes a folder whose writer was killed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from hps.errors import ModelError

_PREFIX = ".import-"
# A temporary file of ``model.yaml`` that is older than this was left by a killed writer: writing and
# renaming it takes far less time.
_SPEC_SECONDS = 60.0
_SYNCS = 8
# Constants of <fcntl.h> and <stdio.h> on Linux.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def hidden_folder(model: Path, version: int) -> Iterator[Path]:
    """Make a locked folder ``.import-<version>-<random>``; remove it at the end unless it was renamed.

    Also removes the model's folder if that is empty then. Converts OSError, such as of a full disk, to
    ModelError."""
    folder, lock = _locked_folder(model, version)
    try:
        yield folder
    except OSError as error:
        file = f" ({error.filename})" if error.filename else ""
        raise ModelError(
            f"writing a version into {model} failed: {error.strerror or error}{file}"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        with suppress(OSError):  # the folder is not empty
            model.rmdir()


@contextmanager
def locked_model(model: Path) -> Iterator[None]:
    """Exclude other writers of a model's folder while a version gets its name."""
    lock = os.open(model, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _locked_folder(model: Path, version: int) -> tuple[Path, int]:
    """Make a hidden folder and lock it; another writer may take a new one for a leftover before that."""
    while True:
        folder = model / f"{_PREFIX}{version}-{secrets.token_hex(4)}"
        make_folder(folder)
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == folder.stat().st_ino:
                return folder, lock
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(lock)


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot make the folder {folder}: {error.strerror}") from error


def clean_leftovers(model: Path) -> list[Path]:
    """Remove leftovers of killed writers from a model's folder; return the removed paths."""
    removed = []
    for folder in model.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.is_dir():
                shutil.rmtree(folder, ignore_errors=True)
            elif folder.stat().st_mtime > time.time() - _SPEC_SECONDS:
                continue
            else:
                folder.unlink()
            removed.append(folder)
        except (BlockingIOError, FileNotFoundError):
            pass
        finally:
            os.close(lock)
    return removed


def publish_version(folder: Path, final: Path, *, replace: bool) -> None:
    """Rename the hidden ``folder`` to ``final``.

    ``replace``: an existing version becomes a leftover, which `clean_leftovers` removes."""
    if not final.exists() and _renamed(folder, final):
        pass
    elif not replace:
        raise ModelError(
            f"{final} was written by another process meanwhile; use another version number"
        )
    elif not _exchange(folder, final):
        old = final.with_name(f"{_PREFIX}replaced-{secrets.token_hex(4)}")
        final.rename(old)
        folder.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    fsync_path(final.parent)


def _renamed(folder: Path, final: Path) -> bool:
    """Rename a folder; False if another process has made ``final`` meanwhile."""
    try:
        folder.rename(final)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders atomically. False if the system or file system does not support it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    done: int = rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    return done == 0


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers see it completely or not at all."""
    temporary = path.with_name(f"{_PREFIX}spec-{secrets.token_hex(4)}")
    temporary.write_text(text)
    fsync_path(temporary)
    temporary.rename(path)
    fsync_path(path.parent)


def fsync_all(folder: Path) -> None:
    """Sync every file in ``folder`` to the disk, several at a time: they share the file system's commits."""
    with ThreadPoolExecutor(_SYNCS, "hps-sync") as pool:
        list(pool.map(fsync_path, list(folder.rglob("*"))))


def fsync_path(path: Path) -> None:
    """Sync a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
