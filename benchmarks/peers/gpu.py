"""The GPU cache's peers: built from their sources, measured by our drivers (``gpu_*.cu`` in this folder).

Sources are in ``.peers/gpu/<name>``, cloned at the commits below if they are missing; programs in
``.peers/gpu/bin``. Building needs ``nvcc`` and two minutes; for machines without network access, copy either
folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import HERE, ROOT, PeerMissing

FOLDER = ROOT / "gpu"
NVCC = ("nvcc", "-std=c++17", "-O3", "-arch=sm_90", "-w", f"-I{HERE}")


@dataclass(frozen=True)
class Peer:
    """``sources`` are compiled with the driver, ``flags`` are added to the common ones; paths are
    relative to the peer's folder."""

    name: str
    title: str
    repository: str
    commit: str
    includes: tuple[str, ...]
    sources: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def driver(self) -> Path:
        return HERE / f"gpu_{self.name}.cu"

    @property
    def program(self) -> Path:
        """The program; its name has a digest of its sources."""
        total = hashlib.sha256(repr(self).encode())
        for file in (self.driver, HERE / "gpu_common.cuh"):
            total.update(file.read_bytes())
        return FOLDER / "bin" / f"{self.name}-{total.hexdigest()[:12]}"


PEERS = (
    Peer(
        "nve",
        "NVE ecache",
        "https://github.com/NVIDIA/nv-embedding-cache",
        "318a481",
        (".", "include"),
        flags=("--expt-relaxed-constexpr", "--extended-lambda", "-DNVE_CACHE_LINE_SIZE=64"),
    ),
    Peer(
        "hkv",
        "HierarchicalKV",
        "https://github.com/NVIDIA-Merlin/HierarchicalKV",
        "ae24eec",
        ("include",),
    ),
    Peer(
        "hps",
        "HPS gpu_cache and static table",
        "https://github.com/NVIDIA-Merlin/HugeCTR",
        "v24.06.00",
        ("gpu_cache/include",),
        tuple(
            f"gpu_cache/src/{name}.cu"
            for name in ("nv_gpu_cache", "static_table", "static_hash_table")
        ),
        ("-Xcompiler", "-fopenmp"),
    ),
)


def build(names: Iterable[str] = tuple(peer.name for peer in PEERS)) -> dict[str, str]:
    """Build the missing programs of ``names`` in parallel; returns the errors by name."""
    wanted = [peer for peer in PEERS if peer.name in names]
    with ThreadPoolExecutor(len(wanted)) as threads:
        failed = threads.map(_build_error, wanted)
    return {peer.name: why for peer, why in zip(wanted, failed, strict=True) if why}


def figures(name: str, dim: int, rows: int, *options: str) -> dict[str, float]:
    """Run the peer's driver with tables of ``rows`` x ``dim`` and its ``options``.

    Returns 10^9 keys/s by ``WHAT`` for calls of a million keys, ``WHAT/KEYS`` for others; empty if the
    program is missing."""
    peer = next(peer for peer in PEERS if peer.name == name)
    if not peer.program.exists():
        return {}
    command = [str(peer.program), str(dim), str(rows), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found: dict[str, float] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            figure: dict[str, Any] = json.loads(line)
            small = "" if figure["keys"] == 1 << 20 else f"/{figure['keys']}"
            found[figure["what"] + small] = figure["rate"]
    return found


def _build_error(peer: Peer) -> str:
    try:
        _build(peer)
    except PeerMissing as missing:
        return str(missing)
    return ""


def _build(peer: Peer) -> None:
    if peer.program.exists():
        return
    if not shutil.which("nvcc"):
        raise PeerMissing("nvcc not found; install the CUDA toolkit")
    if not peer.folder.is_dir():
        peer.folder.parent.mkdir(parents=True, exist_ok=True)
        _run("git", "clone", "--quiet", "--filter=blob:none", peer.repository, str(peer.folder))
        _run("git", "-C", str(peer.folder), "checkout", "--quiet", peer.commit)
    peer.program.parent.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{peer.folder / place}" for place in peer.includes]
    objects = [str(peer.program) + f".{i}.o" for i in range(len(peer.sources))]
    for source, target in zip(peer.sources, objects, strict=True):
        _run(*NVCC, *includes, *peer.flags, "-c", str(peer.folder / source), "-o", target)
    _run(*NVCC, *includes, *peer.flags, str(peer.driver), *objects, "-o", str(peer.program))
    for target in objects:
        Path(target).unlink()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()
        raise PeerMissing(f"{command[0]} failed: {last[-1] if last else done.returncode}")
