from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.native.twin_codec import Group
from hps.native.twin_in_flight import Share

SOURCES: str
"""The digest of the sources that it was built from, see source.py."""

def partition_hash(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """See twin.partition_hash."""

def dedup(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """See twin.dedup."""

def stack_distances(ids: NDArray[np.int64], distinct: int) -> NDArray[np.int64]:
    """See twin.stack_distances."""

def count_in_buckets(
    values: NDArray[Any],
    bounds: NDArray[np.float64],
    counts: NDArray[np.int64],
    sums: NDArray[np.float64],
) -> None:
    """See twin.count_in_buckets."""

def cache_bytes(capacity: int, row_bytes: int) -> int:
    """Return the bytes of a table of ``capacity`` rows of ``row_bytes``."""

def copy_rows(rows: NDArray[Any], numbers: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copy ``rows[numbers[i]]`` to ``out[i]``: the lower bound for benchmarks of lookups."""

def cache_kernels() -> list[str]:
    """Return the instruction sets of the read kernels that this machine can run, the fastest first."""

class CacheTable:
    """See twin_cache.CacheTable. Raises TypeError or ValueError for arrays that do not fit.

    ``kernels``: one of ``cache_kernels()``; None selects the fastest."""

    def __init__(
        self,
        capacity: int,
        like: NDArray[Any],
        eviction: str,
        code: int,
        kernels: str | None = None,
        file: int = -1,
        huge_pages: str = "try",
        numa_node: int = -1,
        on_demand: bool = False,
        format: int | None = None,
    ) -> None:
        """Create the table in private memory, or in the file of the descriptor ``file``, to share it.

        ``on_demand``: memory of a file is allocated as rows arrive; if there is none, rows are evicted.
        Raises MemoryError if memory is exhausted, RuntimeError if the system refuses pages or node."""

    @staticmethod
    def attach(file: int, like: NDArray[Any], code: int, format: int | None = None) -> CacheTable:
        """Attach to the table in ``file``. Raises ValueError if there is no table of such rows."""

    def repair(self) -> bool:
        """Complete or revert the change that a killed writer left; False if there was none."""

    threads: int
    """The number of threads that a call with many keys may use."""

    @property
    def rows(self) -> int: ...
    @property
    def tombstones(self) -> int: ...
    @property
    def evictions(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def buckets(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def fetch(
        self,
        keys: NDArray[np.int64],
        missing: NDArray[np.int64],
        oldest_tombstone: int,
        out: NDArray[Any],
        versions: NDArray[np.uint64],
        source: NDArray[np.uint8],
    ) -> NDArray[np.int64] | None:
        """See twin_cache.CacheTable.fetch."""

    def gather(self, keys: NDArray[np.int64], out: NDArray[Any]) -> bool:
        """See twin_cache.CacheTable.gather."""

    def pool_bags(
        self,
        keys: NDArray[np.int64],
        offsets: NDArray[np.int64] | None,
        weights: NDArray[np.float32] | None,
        divisors: NDArray[np.float32] | None,
        out: NDArray[Any],
        supplied: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None,
    ) -> NDArray[np.int64] | None:
        """See twin_cache.CacheTable.pool_bags."""

    def write(
        self,
        keys: NDArray[np.int64],
        rows: NDArray[Any] | None,
        versions: NDArray[np.uint64],
        oldest_tombstone: int,
        resident_only: bool,
    ) -> None:
        """See twin_cache.CacheTable.write."""

    def evict(self, keys: NDArray[np.int64]) -> None:
        """See twin_cache.CacheTable.evict."""

    def expire(self, oldest: int, first: int, n: int) -> int:
        """See twin_cache.CacheTable.expire."""

    def top_k(self, n: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """See twin_cache.CacheTable.top_k."""

class MappedTable:
    """See twin_mapped.MappedTable. Raises TypeError or ValueError for arrays that do not fit.

    Once a page of the file could not be read, `gather` and `pool_bags` find no row, and other reads raise
    RuntimeError. ``kernels``: one of
    ``cache_kernels()``; None selects the fastest."""

    def __init__(
        self,
        file: int,
        like: NDArray[Any],
        sections: list[int],
        parts: NDArray[np.uint32],
        remap_entries: int,
        version: int,
        code: int,
        bitmap: NDArray[np.uint64] | None = None,
        kernels: str | None = None,
        format: int | None = None,
    ) -> None: ...

    threads: int
    """The number of threads that a fetch of many keys may use."""

    @property
    def rows(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def is_damaged(self) -> bool:
        """True once a page of the file could not be read."""

    @property
    def overridden(self) -> int: ...
    def fetch(
        self,
        keys: NDArray[np.int64],
        missing: NDArray[np.int64],
        out: NDArray[Any],
        versions: NDArray[np.uint64],
        source: NDArray[np.uint8],
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
        """See twin_mapped.MappedTable.fetch."""

    def gather(self, keys: NDArray[np.int64], out: NDArray[Any]) -> bool:
        """See twin_mapped.MappedTable.gather."""

    def pool_bags(
        self,
        keys: NDArray[np.int64],
        offsets: NDArray[np.int64] | None,
        weights: NDArray[np.float32] | None,
        divisors: NDArray[np.float32] | None,
        out: NDArray[Any],
        supplied: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None,
    ) -> NDArray[np.int64] | None:
        """See twin_cache.CacheTable.pool_bags."""

    def positions(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """See twin_mapped.MappedTable.positions."""

    def keys_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See twin_mapped.MappedTable.keys_at."""

    def copy_records(self, positions: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy the rows of known records: the lower bound for benchmarks of lookups."""

    def populate(self, keys: NDArray[np.int64]) -> int:
        """See twin_mapped.MappedTable.populate."""

    def load(self, begin: int, end: int) -> None:
        """See twin_mapped.MappedTable.load."""

    def resident(self, begin: int, end: int) -> float:
        """See twin_mapped.MappedTable.resident."""

    def override_keys(self, keys: NDArray[np.int64]) -> int:
        """See twin_mapped.MappedTable.override_keys."""

    def clear_overrides(self) -> None:
        """Remove all marks."""

class LayeredTable:
    """See twin_layered.LayeredTable. Raises TypeError or ValueError for arrays that do not fit."""

    def __init__(self, mapped: MappedTable, cache: CacheTable | None, code: int) -> None: ...

    threads: int
    """The number of threads that a call with many keys may use."""

    @property
    def dim(self) -> int: ...
    @property
    def tombstones(self) -> int: ...
    def fetch(
        self,
        keys: NDArray[np.int64],
        missing: NDArray[np.int64],
        oldest_tombstone: int,
        out: NDArray[Any],
        versions: NDArray[np.uint64],
        source: NDArray[np.uint8],
    ) -> NDArray[np.int64] | None:
        """See twin_cache.CacheTable.fetch."""

    def gather(self, keys: NDArray[np.int64], out: NDArray[Any]) -> bool:
        """See twin_cache.CacheTable.gather."""

    def pool_bags(
        self,
        keys: NDArray[np.int64],
        offsets: NDArray[np.int64] | None,
        weights: NDArray[np.float32] | None,
        divisors: NDArray[np.float32] | None,
        out: NDArray[Any],
        supplied: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None,
    ) -> NDArray[np.int64] | None:
        """See twin_cache.CacheTable.pool_bags."""

def bitmap_words(rows: int) -> int:
    """See twin_mapped.bitmap_words."""

def index_hashes(keys: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """See twin_mapped.index_hashes."""

def build_index_part(
    hashes: NDArray[np.uint64], first_bucket: int, buckets: int, n_buckets: int, slots: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint32], NDArray[np.uint32]] | None:
    """See twin_mapped.build_index_part."""

def place_records(
    positions: NDArray[np.uint32],
    keys: NDArray[np.int64],
    rows: NDArray[Any],
    records: NDArray[np.uint8],
) -> None:
    """See twin_mapped.place_records."""

def gather_all(
    tables: dict[Any, CacheTable | LayeredTable]
    | dict[Any, CacheTable | MappedTable]
    | dict[Any, CacheTable],
    requests: list[tuple[Any, NDArray[np.int64], NDArray[Any]]],
    threads: int = 1,
) -> bool:
    """See twin_pool.gather_all."""

class WorkerPool:
    """Threads for many short calls, started at their first use; see twin_misses.WorkerPool."""

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

def gather_misses(
    tables: Sequence[CacheTable | LayeredTable | MappedTable | None],
    bases: NDArray[np.uint32],
    keys: NDArray[np.int64],
    positions: NDArray[np.uint32],
    rows: NDArray[np.uint8],
    sources: NDArray[np.uint8],
    code: int,
    counts: NDArray[np.uint32],
    listed: bool = False,
    pool: WorkerPool | None = None,
    placing: PlaceLaunch | None = None,
    stream: int = 0,
) -> int:
    """See twin_misses.gather_misses. Raises TypeError or ValueError for arrays that do not fit.

    ``placing``: places the rows on ``stream`` as they are gathered. RuntimeError is the driver's error."""

def copy_keys(
    arrays: list[NDArray[np.int64]], out: NDArray[np.int64], pool: WorkerPool | None = None
) -> int:
    """See twin_misses.copy_keys. Raises TypeError or ValueError for arrays that do not fit."""

FetchPartNumbers = tuple[int, int, int, int, int, int, int]
"""Addresses of keys, positions, out, versions and source, the oldest tombstone, and the number of keys."""

class FetchLaunch:
    """Launches of fetch_kernel with prepared arguments. Addresses and CUDA handles are integers.

    One thread at a time. Methods raise RuntimeError with the driver's error."""

    @staticmethod
    def make(arguments: int, count: int, count_arguments: int, now: list[int]) -> FetchLaunch:
        """``arguments``: of fetch_kernel, with the fields that a table decides; ``count`` and its arguments:
        count_kernel, whose ``result`` both use; ``now``: cells of the parts' field of that name."""

    def prepare_block(
        self,
        function: int,
        blocks: int,
        keys_a_block: int,
        behind: bool,
        offsets: list[int],
        keyed: list[int],
    ) -> None:
        """Prepare `run_block`: ``offsets`` of rows in the block, by part; ``keyed``: parts with new keys."""

    def run_block(self, block: int, keys: list[int], stream: int, end: int) -> None:
        """Launch on ``stream`` for rows in ``block``, and record the event ``end``."""

    def run_parts(
        self,
        function: int,
        keys_a_block: int,
        parts: list[FetchPartNumbers],
        misses: int,
        stream: int,
        end: int,
        behind: bool,
    ) -> None:
        """Launch ``function`` on ``stream``, with the list of ``misses``, and record the event ``end``.

        ``behind``: count_kernel reports the misses, else fetch_kernel."""

    def wait(self) -> int:
        """Wait for the last launch, without the GIL, and return its number of misses."""

    def run_parts_copied(
        self,
        function: int,
        keys_a_block: int,
        parts: list[FetchPartNumbers],
        misses: int,
        arrays: list[NDArray[np.int64]],
        chunk_keys: int,
        stream: int,
        end: int,
        pool: WorkerPool | None = None,
    ) -> None:
        """Like `run_parts`, in chunks, as ``pool`` copies ``arrays``, the parts' keys ``(n,)``, to their
        addresses. Without the GIL. Raises ValueError for other arrays, or parts with positions."""

    def run_block_copied(
        self,
        block: int,
        arrays: list[NDArray[np.int64]],
        chunk_keys: int,
        stream: int,
        end: int,
        pool: WorkerPool | None = None,
    ) -> None:
        """Like `run_block`, in chunks as `run_parts_copied`."""

class PlaceLaunch:
    """Launches of place_kernel with prepared arguments; addresses are integers."""

    @staticmethod
    def make(function: int, rows_a_block: int, arguments: int) -> PlaceLaunch: ...

def hold_back(stream: int, events: list[int]) -> None:
    """Let ``stream`` wait for the ``events`` of fetches, between launches of other threads."""

def waited_ns() -> int:
    """Return the nanoseconds that this thread has spent in `FetchLaunch.wait`."""

def order_after(stream: int, other: int, event: int) -> None:
    """Let ``stream`` wait for the work on ``other`` so far, by ``event``."""

def pool_rows(
    rows: NDArray[Any],
    numbers: NDArray[np.int64] | None,
    offsets: NDArray[np.int64] | None,
    weights: NDArray[np.float32] | None,
    divisors: NDArray[np.float32] | None,
    out: NDArray[Any],
    kernels: str | None = None,
    format: int | None = None,
) -> None:
    """See twin_pool.pool_rows; rows must be float32, float16 or have a format. ``kernels``: as of
    `CacheTable`."""

def decode_rows(
    rows: NDArray[Any],
    numbers: NDArray[np.int64] | None,
    out: NDArray[Any],
    format: int,
    kernels: str | None = None,
) -> None:
    """See twin_rows.decode_rows. Raises TypeError or ValueError for arrays that do not fit."""

def encode_rows(
    vectors: NDArray[np.float32],
    format: int,
    rows: NDArray[Any],
    storable: NDArray[np.uint8],
    kernels: str | None = None,
) -> None:
    """See twin_rows.encode_rows. Raises TypeError or ValueError for arrays that do not fit."""

class InFlight:
    """See twin_in_flight.InFlight. Raises TypeError or ValueError for arguments that do not fit."""

    def claim(
        self,
        number: int,
        tables: Sequence[int],
        keys: Sequence[NDArray[np.int64]],
        missing: Sequence[NDArray[np.int64]],
        now: float,
    ) -> tuple[list[NDArray[np.int64]], list[Share]]: ...
    def land(self, number: int, until: float) -> list[NDArray[np.int64]]: ...
    def leave(self, number: int) -> bool: ...
    def __len__(self) -> int: ...

def set_onnx_kernels(
    function: Callable[[str, dict[str, Any]], Callable[..., NDArray[np.float32]]], /
) -> None:
    """Set what makes the kernels of this library's operators for ONNX Runtime.

    ``function``: an operator's name and a node's attributes to a function of its inputs, None for those that
    are left out. It is called when a session opens, and what it returns by any thread that runs one."""

class ProtocolError(ValueError):
    """See twin_resp.ProtocolError."""

class RowReplies:
    """See twin_resp.RowReplies."""

    def __init__(
        self,
        counts: NDArray[np.int64],
        positions: NDArray[np.int64],
        arrays: tuple[NDArray[Any], NDArray[np.uint64], NDArray[np.uint8]],
        code: int,
        versioned: bool,
        oldest: tuple[int, int],
    ) -> None: ...
    def feed(self, buffer: NDArray[np.uint8], begin: int, end: int) -> int: ...
    @property
    def done(self) -> bool: ...
    @property
    def left(self) -> NDArray[np.int64]: ...
    @property
    def errors(self) -> list[tuple[int, str]]: ...
    @property
    def wrong_length(self) -> int: ...

def decode_hps(
    messages: Sequence[bytes | None],
    keyed: NDArray[np.uint8],
    stamps: NDArray[np.uint64],
    key_bytes: int,
    row_bytes: int,
    max_bytes: int,
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint8]]:
    """See twin_codec.decode_hps."""

def decode_native(
    messages: Sequence[bytes | None], max_bytes: int
) -> tuple[NDArray[np.uint8], list[Group]]:
    """See twin_codec.decode_native."""

def encode_hps(
    keys: NDArray[np.int64],
    vectors: NDArray[np.uint8],
    key_bytes: int,
    row_bytes: int,
    rows_per_message: int,
) -> list[bytes]:
    """See twin_codec.encode_hps."""

def crc32(data: NDArray[np.uint8], crc: int = 0) -> int:
    """See twin_codec.crc32."""

class ScoredTable:
    """See twin_scored.ScoredTable. Raises TypeError or ValueError for arrays that do not fit."""

    def __init__(self, buckets: int, max_buckets: int, like: NDArray[Any]) -> None:
        """Raises MemoryError if the system refuses address space for ``max_buckets``."""

    @staticmethod
    def bytes_for(buckets: int, row_bytes: int) -> int:
        """See twin_scored.ScoredTable.bytes_for."""

    @property
    def buckets(self) -> int: ...
    @property
    def max_buckets(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def rows(self) -> NDArray[Any]: ...
    def find(
        self,
        keys: NDArray[np.int64],
        rows: NDArray[Any] | None,
        scores: NDArray[np.uint64] | None,
    ) -> NDArray[np.bool_]:
        """See twin_scored.ScoredTable.find."""

    def find_rows(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """See twin_scored.ScoredTable.find_rows."""

    def export(
        self, first: int, slots: int, with_rows: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[Any] | None]:
        """See twin_scored.ScoredTable.export."""

    def write(
        self,
        operation: int,
        keys: NDArray[np.int64],
        rows: NDArray[Any] | None,
        accumulate: NDArray[np.bool_] | None,
        rule: int,
        base: int,
        scores: NDArray[np.uint64] | None,
        with_evicted: bool,
    ) -> tuple[
        NDArray[np.bool_], tuple[NDArray[np.int64], NDArray[Any], NDArray[np.uint64]] | None
    ]:
        """See twin_scored.ScoredTable.write."""

    def erase(
        self, keys: NDArray[np.int64], scores: NDArray[np.uint64] | None
    ) -> NDArray[np.bool_]:
        """See twin_scored.ScoredTable.erase."""

    def clear(self) -> None:
        """See twin_scored.ScoredTable.clear."""

    def set_max_buckets(self, max_buckets: int) -> None:
        """See twin_scored.ScoredTable.set_max_buckets. Raises MemoryError as the constructor does."""

    def reserve(self, buckets: int) -> None:
        """See twin_scored.ScoredTable.reserve."""

class Step:
    """One step of a lane's work. Addresses are integers; see hps/batch_scheduler.hpp.

    The memory, kernels and graphs that a step names are the caller's, as long as the lane exists."""

    @staticmethod
    def copy_in(device: int, host: int, nbytes: int, /) -> Step:
        """Copy pinned memory to the device."""

    @staticmethod
    def copy_out(host: int, device: int, nbytes: int, /) -> Step:
        """Copy device memory to pinned memory."""

    @staticmethod
    def kernel(
        function: int,
        blocks: int,
        threads: int,
        arguments: int,
        reads_tables: bool,
        fresh: Sequence[tuple[int, int]],
    ) -> Step:
        """Launch a kernel that takes one struct. ``fresh``: addresses of uint32 fields of it, and of the
        values that are copied there before each launch. Writers wait for one that reads tables."""

    @staticmethod
    def clear(device: int, nbytes: int, /) -> Step:
        """Fill device memory with zeros."""

    @staticmethod
    def graph(executable: int, /) -> Step:
        """Launch a recorded graph."""

    @staticmethod
    def call(function: Callable[[], bool], /) -> Step:
        """Call a function, which logs its errors and returns False for them."""

class FillChunk:
    """A launch of a `MissFill`'s fetch; see hps/native/include/hps/miss_fill.hpp. Addresses are integers."""

    @staticmethod
    def make(
        parts: Sequence[tuple[CacheTable | None, int, int, int, int, int, int]],
        missing: int,
        positions: int,
        keys: int,
        place: Step,
        rows_per_block: int,
        arguments: tuple[int, int, int, int],
    ) -> FillChunk:
        """``parts``: table in host memory (the caller keeps it), base, first key, keys, hotness, feature,
        and the address of the number of keys to fetch. ``arguments``: addresses of the arguments of
        ``place``: positions, rows, source codes, n."""

class MissFill:
    """A lane's work for batches with missing rows; see hps/native/include/hps/miss_fill.hpp."""

    @staticmethod
    def make(
        fetch: Sequence[Step],
        chunks: Sequence[FillChunk],
        rest: Sequence[Step],
        memory: int,
        bytes: int,
        stride: int,
        code: int,
    ) -> MissFill:
        """``memory``: pinned, of ``bytes``, for rows at ``stride`` and their source codes.

        Raises ValueError for memory of less than two rows, or too small a stride."""

class SizeClass:
    """A lane's steps for batches of up to ``batch`` samples."""

    @staticmethod
    def make(
        batch: int,
        inputs: Sequence[int],
        outputs: Sequence[int],
        missing_keys: Sequence[int],
        steps: Sequence[Step],
        fill: MissFill | None = None,
    ) -> SizeClass:
        """``inputs``, ``outputs``: addresses of the columns in host memory; ``missing_keys``: of uint32
        counts that the steps leave, 0 if every row was on the device. Without ``fill``,
        requests with missing rows are slow."""

class BatchScheduler:
    """Continuous batching; see hps/batch_scheduler.hpp. Thread-safe; `run` is its thread.

    ``wake`` is a non-blocking eventfd, which is closed with it. ``spin_us``: time to look for requests
    before it sleeps. ``gathered_here``: misses of a batch that its thread gathers itself."""

    def __init__(self, wake: int, spin_us: int, gathered_here: int = 256) -> None: ...
    def run(self) -> None:
        """Run until `stop`."""

    def stop(self) -> None: ...
    def add_model(self, input_widths: Sequence[int], output_widths: Sequence[int], /) -> int:
        """Add a model whose columns have these bytes per sample; return its number."""

    def add_lane(self, model: int, classes: Sequence[SizeClass], context: int, stream: int) -> int:
        """Add a lane; return its number. Raises RuntimeError if its CUDA events cannot be created."""

    def remove_model(self, model: int, /) -> None: ...
    def add_channel(self, memory: int, wake_client: int, /) -> int:
        """Add a channel in the memory of the file; return its number. ``wake_client`` becomes its own.

        Raises RuntimeError or ValueError for a file that cannot be used."""

    def remove_channel(self, channel: int, /) -> None: ...
    def counts(self, model: int, /) -> dict[str, int]: ...
    def fill_batches(self) -> None:
        """Gather rows of batches with many misses, until `stop`, as a thread of its own."""

    @property
    def filling_threads(self) -> int:
        """The number of threads in `fill_batches`."""

    def take_report(self, timeout_ms: int) -> dict[str, Any] | None:
        """Wait for a report of filled batches: `FillReport` of hps/batch_scheduler.hpp."""

    def take_slow(
        self, timeout_ms: int
    ) -> tuple[int, int, int, int, NDArray[np.uint8], NDArray[np.uint8]] | None:
        """Wait for a request that the lanes cannot run.

        Its number, model, batch, deadline (ns, 0: none), inputs and space for outputs: views that are valid
        until it is answered and the scheduler exists."""

    def answer_slow(self, number: int, status: int, reply_bytes: int, /) -> None: ...
    def hold_back(self, stream: int, /) -> int:
        """Make later work on a stream wait for the lanes' kernels that read tables; a CUDA error code."""

class MessageLayout:
    """Where a message has a request's columns: ``(offset, bytes, add)`` each, in their order.

    ``add`` is added to the column's 64-bit integers, unless it is 0."""

    def __init__(self, columns: Sequence[tuple[int, int, int]]) -> None: ...

class ChannelClient:
    """A client's end of a channel; see hps/request_channel.hpp. Thread-safe, but for `receive`.

    The descriptors are closed with the object. Raises ValueError for a file that is not a channel."""

    def __init__(self, file: int, wake: int, woken: int) -> None: ...
    def submit(
        self,
        ticket: int,
        model: int,
        batch: int,
        deadline_ns: int,
        columns: Sequence[NDArray[Any]],
        out_bytes: int,
        reply_bytes: int,
    ) -> bool:
        """Send a request; False if the channel is full. ``columns``: C-contiguous arrays."""

    def submit_message(
        self,
        ticket: int,
        model: int,
        batch: int,
        deadline_ns: int,
        message: bytes,
        start: int,
        layout: MessageLayout,
        out_bytes: int,
        reply_bytes: int,
    ) -> bool:
        """Send a request whose columns are in ``message`` from ``start`` on. Raises ValueError if it is
        shorter than ``layout``."""

    def receive(self, timeout_ms: int) -> list[tuple[int, int, NDArray[np.uint8], int, int, int]]:
        """Wait for answers: ticket, status, data, samples complete on the device, launch and end in ns."""

    def sleep(self) -> bool:
        """Announce that ``woken`` is watched until it is readable; False if an answer has arrived."""

    def interrupt(self) -> None:
        """End a `receive` that waits."""

    @property
    def capacity(self) -> int: ...
