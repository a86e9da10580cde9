"""The doctor's checks: each looks at one thing and says how to mend it."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hps.cli.output import plural, size
from hps.errors import HpsError, TierError, TierTimeout, Unauthenticated

if TYPE_CHECKING:
    from hps.client import Tls
    from hps.config import Configuration
    from hps.config.schema import Settings
    from hps.config.server_settings import Listener
    from hps.config.store_settings import RedisSettings
    from hps.models.repository import ModelVersion
    from hps.types import EmbeddingTable

Verdict = Literal["OK", "WARN", "FAIL"]

GPU = Path("/dev/nvidia0")
NETWORK = Path(__file__).parent / "demo_model/ctr/1/dense.onnx"
OPEN_FILES = 4096
SHM_BYTES = 256 << 20
# Tables lie on disk twice while they are loaded: once in the model's files, once in the database;
# compaction needs room beside that.
DISK_FACTOR = 2
REDIS_PATIENCE_MS = 2000.0


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, and what to do about it unless all is well."""

    name: str
    verdict: Verdict
    found: str
    mend: str = ""


def machine() -> Iterator[Check]:
    """Python, packages, compiled core, GPU and limits; whatever is served."""
    yield python()
    yield packages()
    yield native_core()
    yield gpu()
    if GPU.exists():
        yield networks()
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield shared_memory(Path("/dev/shm"))


def python() -> Check:
    return Check("Python", "OK", ".".join(map(str, sys.version_info[:3])))


def packages() -> Check:
    """The packages that the product's own metadata names; extras are optional."""
    try:
        required = metadata.requires("hps-server") or []
    except metadata.PackageNotFoundError:
        return Check("packages", "FAIL", "hps-server is not installed", "pip install -e .")
    needed = [_distribution(text) for text in required if "extra ==" not in text]
    missing = []
    for name in needed:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        found = f"not installed: {', '.join(missing)}"
        return Check("packages", "FAIL", found, f"pip install {' '.join(missing)}")
    return Check("packages", "OK", f"all {len(needed)} are there")


def _distribution(requirement: str) -> str:
    """``tritonclient[http]>=2`` -> ``tritonclient``."""
    for i, letter in enumerate(requirement):
        if not (letter.isalnum() or letter in "-_."):
            return requirement[:i]
    return requirement


def native_core() -> Check:
    try:
        from hps.native import COMPILED
    except HpsError as error:  # of other sources
        found, _, mend = str(error).partition(": ")
        return Check("native core", "FAIL", found, mend)
    if COMPILED:
        return Check("native core", "OK", "compiled")
    mend = "install a C++ compiler and python3-dev, then reinstall hps (and unset HPS_NATIVE=off)"
    return Check("native core", "WARN", "slower NumPy twins are in use", mend)


def gpu() -> Check:
    """Whether there is a GPU, and whether its packages work."""
    if not GPU.exists():
        return Check("GPU", "OK", "none; hps serves from the CPU")
    from hps.cuda.loader import lacking

    if why := lacking():
        return Check("GPU", "WARN", f"there is one, but {why}", "pip install 'hps-server[gpu]'")
    return Check("GPU", "OK", "there is one, and CuPy can use it")


def networks() -> Check:
    """Whether ONNX Runtime runs networks on the GPU. Its two packages fill one folder: the last one stays."""
    from hps.dense.onnx import OnnxModel

    try:
        OnnxModel(NETWORK, "cuda")
    except HpsError as error:
        found = f"run on the CPU: {str(error).partition('; ')[0]}"
        mend = "pip install 'hps-server[gpu]', then pip install --force-reinstall --no-deps onnxruntime-gpu"
        return Check("networks", "WARN", found, mend)
    return Check("networks", "OK", "ONNX Runtime runs them on the GPU")


def open_files(limit: int) -> Check:
    """RocksDB keeps its table files open; each connection is one more."""
    if limit == resource.RLIM_INFINITY or limit >= OPEN_FILES:
        return Check("open files", "OK", "unlimited" if limit < 0 else f"up to {limit}")
    mend = "raise the limit: ulimit -n 65536, or LimitNOFILE= of the service"
    return Check("open files", "WARN", f"up to {limit}, {OPEN_FILES} wanted", mend)


def shared_memory(path: Path) -> Check:
    if not path.is_dir():
        return Check("shared memory", "WARN", f"there is no {path}", "mount a tmpfs there")
    total = shutil.disk_usage(path).total
    if total >= SHM_BYTES:
        return Check("shared memory", "OK", f"{path} has {size(total)}")
    mend = "in a container: --shm-size 2g (Docker), an emptyDir of medium Memory (Kubernetes)"
    return Check("shared memory", "WARN", f"{path} has {size(total)} only", mend)


def configured(
    configuration: Configuration, api_key: str | None = None, tls: Tls | None = None
) -> Iterator[Check]:
    """What the settings lead to: ports, models, disk."""
    settings = configuration.settings
    yield attempt("access", lambda: exposure(settings))
    for name in ("http", "grpc", "admin"):
        listener = getattr(settings.server, name)
        if listener is not None:
            yield port(f"{name} port", listener, api_key, tls)
            if listener.tls is not None:
                yield attempt(f"{name} certificates", partial(certificates, name, listener))
    yield processes(settings)
    versions = []
    for check, version in models(configuration):
        versions += [version] if version else []
        yield check
    if settings.tiers.rocksdb.enabled:
        yield database(settings.tiers.rocksdb.path, sum(map(_bytes, versions)))
    if settings.tiers.redis is not None:
        tables = [t for version in versions for t in version.embedding_tables().values()]
        yield from redis(settings.tiers.redis, tables)


def processes(settings: Settings) -> Check:
    """Which processes there will be; whether workers can read the node's cache."""
    count, cache = settings.server.workers, settings.tiers.cpu_cache
    if not count:
        return Check("processes", "OK", "the node alone")
    found = f"the node and {plural(count, 'worker')}"
    if not cache.enabled:
        mend = "set tiers.cpu_cache.enabled to true"
        return Check("processes", "WARN", f"{found}, which ask the node for every row", mend)
    from hps.native import COMPILED

    if not COMPILED:
        mend = "build it (make setup), or set server.workers to 0"
        return Check(
            "processes", "FAIL", f"{found}, but a shared cache needs the native core", mend
        )
    folder = cache.shared.folder
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    if cache.share is None and free < cache.capacity_bytes:
        found += (
            f"; the cache may take {size(cache.capacity_bytes)}, {folder} has {size(free)} free"
        )
        mend = "enlarge it (docker run --shm-size), or lower tiers.cpu_cache.capacity_bytes"
        return Check("processes", "WARN", found, mend)
    return Check("processes", "OK", f"{found}, {folder} has {size(free)} free")


def attempt(name: str, check: Callable[[], Check]) -> Check:
    """An error becomes the check's verdict."""
    try:
        return check()
    except HpsError as error:
        return failed(name, error)


def failed(name: str, error: HpsError, mend: str = "see the message") -> Check:
    """Our errors read "cause; mend"."""
    found, _, told = str(error).partition("; ")
    return Check(name, "FAIL", found, told or mend)


def exposure(settings: Settings) -> Check:
    from hps.config.auth import check_exposure

    check_exposure(settings)
    mode = settings.auth.mode or "off"
    found = f"auth.mode {mode}"
    return Check("access", "OK", found + (", loopback only" if mode == "off" else ""))


def port(name: str, at: Listener, api_key: str | None = None, tls: Tls | None = None) -> Check:
    """Free, or taken by an hps server (which is as it should be), or taken by something else."""
    host, number = at.host, at.port
    if number == 0:
        return Check(name, "OK", "any free one")
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
            return Check(name, "OK", f"{host}:{number} is free")
        except OSError as error:
            reason = error.strerror or str(error)
    try:
        if is_ours(at, api_key, tls):
            return Check(name, "OK", f"{host}:{number} is served by hps")
    except Unauthenticated:
        found = f"{host}:{number} is taken by a server that wants an API key"
        return Check(name, "WARN", found, "give --api-key, to see whether it is hps")
    except HpsError as error:
        if at.tls is not None:
            mend = "give --tls, to see whether it is hps"
            return Check(name, "WARN", f"{host}:{number} is taken: {error}", mend)
    setting = f"server.{name.split()[0]}.port"
    mend = f"stop what listens there, or set {setting}"
    return Check(name, "FAIL", f"{host}:{number} cannot be had: {reason}", mend)


def certificates(name: str, at: Listener) -> Check:
    """Whether the files of the port's certificates can be used. Raises ConfigError."""
    from services.frontend.certificates import server_context

    server_context(at, f"server.{name}")
    assert at.tls is not None
    return Check(f"{name} certificates", "OK", str(at.tls.certificate_file))


def is_ours(at: Listener, api_key: str | None, tls: Tls | None) -> bool:
    """Whether an hps server answers there. Raises what ``Client`` raises."""
    from hps.client import Client
    from hps.config.server_settings import GrpcListener

    host = "127.0.0.1" if at.host in ("0.0.0.0", "::") else at.host
    host = f"[{host}]" if ":" in host else host
    scheme = ("grpc" if isinstance(at, GrpcListener) else "http") + ("s" if at.tls else "")
    url, used = f"{scheme}://{host}:{at.port}", tls if at.tls else None
    with Client(url, api_key=api_key, timeout_s=2, retries=0, tls=used) as client:
        return client.is_hps()


def models(configuration: Configuration) -> Iterator[tuple[Check, ModelVersion | None]]:
    """Every model that would be served, and its version if it can be opened."""
    from hps.models.repository import Repository, open_legacy

    settings = configuration.settings.models
    opened: dict[str, Callable[[], ModelVersion]] = {
        legacy.spec.name: partial(open_legacy, legacy) for legacy in configuration.legacy
    }
    overrides = settings.serve or {}
    repository = Repository(settings.repository)
    names = list(overrides)
    if settings.serve is None and (not opened or settings.repository.is_dir()):
        try:
            names = repository.names()
        except HpsError as error:
            yield failed("models", error, "set models.repository"), None
            return
    for name in names:
        opened.setdefault(name, partial(repository.open, name, override=overrides.get(name)))
    if not opened:
        found = f"no model in {settings.repository}"
        yield Check("models", "FAIL", found, "import one: hps model import --help"), None
    for name, open_it in opened.items():
        yield _model(name, open_it, settings.repository)


def _model(
    name: str, open_it: Callable[[], ModelVersion], repository: Path
) -> tuple[Check, ModelVersion | None]:
    try:
        version = open_it()
    except HpsError as error:
        mend = f"hps model verify {name} --repository {repository}"
        return failed(f"model {name}", error, mend), None
    rows = sum(files.rows for files in version.tables.values())
    tables = plural(len(version.tables), "table")
    found = f"version {version.version}, {tables}, {plural(rows, 'row')}"
    return Check(f"model {name}", "OK", found), version


def _bytes(version: ModelVersion) -> int:
    return sum(files.bytes for files in version.tables.values())


def redis(settings: RedisSettings, tables: Sequence[EmbeddingTable]) -> Iterator[Check]:
    """Whether Redis answers, and holds each table the way it would be read."""
    from hps.tiers.redis import RedisTier

    patience = min(settings.timeout_ms, REDIS_PATIENCE_MS)
    tier = RedisTier(settings.model_copy(update={"timeout_ms": patience}))
    try:
        for table in tables:
            name = f"Redis: {table.model}/{table.name}"
            try:
                tier.check(table)
                used = tier.usage(table)
            except TierTimeout as error:
                yield failed("Redis", error, "start it, or correct tiers.redis")
                return
            except TierError as error:
                yield failed(name, error, "start it, or correct tiers.redis")
            else:
                found = f"{plural(used.entries, 'row')}, {size(used.bytes)}, {settings.layout}"
                yield Check(name, "OK", found)
    finally:
        tier.close()


def database(path: Path, table_bytes: int) -> Check:
    """Whether the database's folder can be written and has room for the tables."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        mend = "give this user the right, or set tiers.rocksdb.path"
        return Check("database", "FAIL", f"{there} is not a folder one may write to", mend)
    free = shutil.disk_usage(there).free
    if path.exists() or free >= DISK_FACTOR * table_bytes:
        return Check("database", "OK", f"{path}, {size(free)} free")
    found = f"{path}: {size(free)} free, the tables need about {size(DISK_FACTOR * table_bytes)}"
    return Check("database", "FAIL", found, "make room, or set tiers.rocksdb.path to a larger disk")
