"""Table of all metrics; docs/metrics.md is generated from it (`hps.observability.metric_page`)."""

from __future__ import annotations

from collections.abc import Mapping

from hps.observability import metric_names as m
from hps.observability.metric_downloads import DOWNLOADS
from hps.observability.metric_models import MODELS
from hps.observability.metric_scheduler import SCHEDULER
from hps.observability.metric_spec import AGE_BUCKETS, BATCH_BUCKETS, MetricSpec
from hps.observability.metric_traffic import TRAFFIC

_PROCESSES = (
    MetricSpec(
        m.BUILD_INFO,
        "gauge",
        ("version", "native"),
        "Always 1; labels describe the running process.",
    ),
    MetricSpec(
        m.READY,
        "gauge",
        ("role",),
        "Readiness: 1 if this process is ready (/v2/health/ready), else 0; role=node, frontend, lookup "
        "or ingest; "
        "role=worker: number of ready workers.",
    ),
    MetricSpec(m.UPTIME, "gauge", (), "Seconds since the node was opened."),
    MetricSpec(
        m.PROCESS_CPU,
        "counter",
        ("process",),
        "CPU time of processes in seconds; process=worker: all workers together.",
    ),
    MetricSpec(
        m.PROCESS_MEMORY,
        "gauge",
        ("process", "kind"),
        "Resident memory; kind=anonymous (private to a process), file, or shared, which counts for each "
        "process that has touched it.",
    ),
    MetricSpec(
        m.MEMORY_USED,
        "gauge",
        (),
        "Memory in use by all processes of the container, without reclaimable file caches. Without a "
        "container's limit, of the machine.",
    ),
    MetricSpec(
        m.MEMORY_LIMIT,
        "gauge",
        (),
        "Memory limit beyond which a process is killed: the container's limit, else the machine's memory.",
    ),
    MetricSpec(
        m.CERTIFICATE_EXPIRY,
        "gauge",
        ("setting",),
        "Expiry of the certificates in the setting's file, in seconds since 1970: the earliest one, of "
        "roots the latest.",
    ),
    MetricSpec(m.WORKERS, "gauge", (), "Worker processes that answer requests."),
    MetricSpec(
        m.WORKER_RESTARTS,
        "counter",
        (),
        "Worker processes that were replaced after they ended unexpectedly or were killed for not "
        "answering.",
    ),
    MetricSpec(
        m.WORKER_TIMEOUTS,
        "counter",
        (),
        "Worker processes that were killed because they did not answer for server.worker_timeout_s.",
    ),
)

_REQUESTS = (
    MetricSpec(
        m.REQUEST_SECONDS,
        "histogram",
        ("protocol", "method", "model", "version", "code"),
        "Time from a request's last byte to its answer's first, by protocol status; model and version are "
        "empty if the request names none that is served.",
    ),
    MetricSpec(
        m.REQUESTS_REFUSED,
        "counter",
        ("reason",),
        "Requests rejected before they were decoded; reason=queue_full, queue_wait or queue_bytes "
        "(overloaded server), client_running or client_rate (a client's limits), unauthenticated or "
        "forbidden (API key), too_large or unavailable.",
    ),
    MetricSpec(
        m.RUNNING_REQUESTS,
        "gauge",
        ("model",),
        "Running inference requests, without those answered from memory immediately.",
    ),
    MetricSpec(
        m.RUNNING_LIMIT,
        "gauge",
        ("model",),
        "Limit on running inference requests; others are queued.",
    ),
    MetricSpec(m.QUEUE_REQUESTS, "gauge", ("model",), "Queued inference requests."),
    MetricSpec(
        m.QUEUE_BYTES,
        "gauge",
        (),
        "Bytes of queued inference requests, and of those being received.",
    ),
    MetricSpec(
        m.QUEUE_SECONDS,
        "histogram",
        ("model",),
        "Time that inference requests were queued, without those that did not wait.",
    ),
    MetricSpec(
        m.BATCH_REQUESTS,
        "histogram",
        ("model",),
        "Requests per batch (server.batching), without those that started immediately because no batch "
        "was running.",
        BATCH_BUCKETS,
    ),
    MetricSpec(
        m.STALE_ANSWERS,
        "counter",
        ("model", "result"),
        "Requests while rows were stale, by updates.max_staleness_s; result=flagged or refused.",
    ),
)

_LOOKUPS = (
    MetricSpec(
        m.LOOKUP_KEYS,
        "counter",
        ("model", "version", "table", "tier"),
        "Keys answered, by the tier that had the row; tier=default: none had it, tier=remote: a lookup "
        "node answered, whose metrics have the tier.",
    ),
    MetricSpec(
        m.LOOKUP_SECONDS, "histogram", ("model", "version"), "Time of one lookup of all its tables."
    ),
    MetricSpec(
        m.LOOKUP_DEGRADED,
        "counter",
        ("model", "tier"),
        "Lookups that skipped this tier because it failed, was late or full.",
    ),
    MetricSpec(m.LOOKUP_WAITING, "gauge", (), "Lookups waiting for a thread to read a store."),
    MetricSpec(
        m.LOOKUP_SHARED,
        "counter",
        (),
        "Keys that a lookup did not read from the stores because another lookup was reading them (single "
        "flight).",
    ),
    MetricSpec(
        m.LOOKUP_NODE_UP,
        "gauge",
        ("address",),
        "State of the lookup node: 1 if this front end uses it; 0 while it does not answer, is not "
        "ready, or is ejected.",
    ),
    MetricSpec(
        m.LOOKUP_NODE_RUNNING,
        "gauge",
        ("address",),
        "Lookups of this front end in flight at the lookup node.",
    ),
    MetricSpec(
        m.LOOKUP_NODE_REQUESTS,
        "counter",
        ("address", "code"),
        "Lookups that this front end sent to the lookup node, by gRPC status, including retries.",
    ),
    MetricSpec(
        m.LOOKUP_NODE_RETRIES,
        "counter",
        ("address",),
        "Lookups retried at another lookup node because this one was unavailable.",
    ),
    MetricSpec(
        m.LOOKUP_NODE_EJECTIONS,
        "counter",
        ("address",),
        "Ejections of the lookup node because lookups failed there.",
    ),
)

_TIERS = (
    MetricSpec(
        m.TIER_KEYS,
        "counter",
        ("tier", "model", "version", "table", "result"),
        "Keys requested from a tier; result=found or missed, whose ratio is the hit rate, or skipped. "
        "Repeated keys of a request count once, but all of them on the fast path.",
    ),
    MetricSpec(
        m.TIER_SECONDS,
        "histogram",
        ("tier",),
        "Time of one fetch from one tier, for all tables of a batch.",
    ),
    MetricSpec(
        m.TIER_SKIPPED,
        "counter",
        ("tier", "reason"),
        "Fetches that skipped a tier; reason=open (circuit breaker), failed, late, full (all of its "
        "threads were busy), no_time (the deadline had passed), refused (some rows: tables that do not "
        "fit, damaged files).",
    ),
    MetricSpec(
        m.TIER_AVAILABLE,
        "gauge",
        ("tier",),
        "State of the tier: 1 if lookups use it; 0 while its circuit breaker is open or half-open.",
    ),
    MetricSpec(
        m.TIER_FACT,
        "gauge",
        ("tier", "fact"),
        "State of a tier. redis: reachable (1 or 0). rocksdb: table_bytes, free_bytes (of its disk), "
        "min_free_bytes (below which it rejects writes), pending_compaction_bytes, running_compactions, "
        "writes_stopped (1: writes wait for compactions), delayed_write_rate (bytes/s; 0: not delayed), "
        "background_errors, stalled_seconds (of writes), lost_writes (upper bound of acknowledged writes "
        "missing at the start), damaged_files (found since the start), mapped_tables, mapped_bytes (of their "
        "files), mapped_overridden (rows that RocksDB replaces). cpu: mapped_tables and "
        "mapped_bytes (of the files that it reads directly). gpu: bytes (of its caches, on each device), "
        "pinned_host_bytes, static_tables.",
    ),
    MetricSpec(
        m.TABLE_ROWS,
        "gauge",
        ("tier", "model", "version", "table"),
        "Rows of a table in a tier. rocksdb: exact until the table is written to, then approximate: added "
        "rows count once they are compacted. Tombstones count, also in redis.",
    ),
    MetricSpec(
        m.TABLE_CAPACITY,
        "gauge",
        ("tier", "model", "version", "table"),
        "Capacity of a tier for a table in rows, if it is bounded.",
    ),
    MetricSpec(
        m.TABLE_BYTES,
        "gauge",
        ("tier", "model", "version", "table"),
        "Bytes of a table in a tier, if known.",
    ),
    MetricSpec(
        m.PROMOTIONS,
        "counter",
        ("tier", "result"),
        "Promotions of keys into a tier; result=inserted, gone (no store has them any more), degraded (a "
        "store was unavailable), dropped (the queue was full), not_admitted (looked up too rarely: "
        "`cache_admit_after`; tier=cpu: also changed rows of mapped files), failed.",
    ),
    MetricSpec(
        m.EXPIRED_ROWS,
        "counter",
        ("tier", "model", "table"),
        "Rows older than `ttl_s` that this process removed from a tier; redis: with expired deletions; "
        "mapped: rows of files that are not served any more.",
    ),
    MetricSpec(m.PROMOTE_QUEUE, "gauge", ("tier",), "Keys waiting to be copied into a tier."),
    MetricSpec(
        m.GPU_MEMORY_USED,
        "gauge",
        ("gpu", "uuid"),
        "Memory of a GPU in use, by all processes.",
    ),
    MetricSpec(m.GPU_MEMORY_TOTAL, "gauge", ("gpu", "uuid"), "Memory of a GPU."),
)

_UPDATES = (
    MetricSpec(
        m.UPDATE_ROWS,
        "counter",
        ("model", "table", "result"),
        "Rows of update streams, counted for each served version; result=upserted, deleted, expired (time to "
        "live), not_finite (NaN or infinite; the former row stays), other_shape (the version's table has "
        "another dim).",
    ),
    MetricSpec(
        m.UPDATE_BATCH,
        "histogram",
        (),
        "Time until one batch of updates was in all stores and caches, including waits for a store.",
    ),
    MetricSpec(
        m.UPDATE_DEAD,
        "counter",
        ("reason",),
        "Dead letters: update messages that cannot be applied, each counted once, however often it is "
        "read.",
    ),
    MetricSpec(
        m.UPDATE_LOST,
        "counter",
        ("group", "topic"),
        "Update messages that Kafka dropped, by the topic's retention, before this group's reader applied "
        "them; their rows are missing in the stores.",
    ),
    MetricSpec(
        m.UPDATE_RESTARTED,
        "counter",
        ("group", "topic"),
        "Partitions that this group's reader read from their beginning again, because the stores were "
        "ahead of them: the topic was deleted and created again, or Kafka lost messages.",
    ),
    MetricSpec(
        m.UPDATE_VISIBLE,
        "histogram",
        ("model", "table", "tier"),
        "Age of updates, since they were made, when they were in a tier; one observation per message.",
        AGE_BUCKETS,
    ),
    MetricSpec(
        m.UPDATE_AGE,
        "gauge",
        ("model", "table"),
        "Possible age of a table's rows: 0 if all updates are applied, else the time since the first "
        "unapplied one arrived; if it arrived before the start, since the newest applied one was made.",
    ),
    MetricSpec(
        m.UPDATE_LAG,
        "gauge",
        ("group", "topic", "partition"),
        "Update messages in Kafka that this group's reader has not polled yet.",
    ),
    MetricSpec(
        m.UPDATE_HELD,
        "gauge",
        ("group", "topic", "partition"),
        "Those of them that wait until the network of their rows is live (updates.hold_for_dense).",
    ),
    MetricSpec(
        m.UPDATE_HOLD_EXPIRED,
        "counter",
        ("group", "topic"),
        "Waits for a network that ended without it, after updates.hold_at_most_s; the rows were applied.",
    ),
    MetricSpec(
        m.UPDATE_PAUSED,
        "gauge",
        ("group",),
        "Pause of this group's reader: 1 if it is paused (`hps updates pause`).",
    ),
    MetricSpec(
        m.UPDATE_PROBLEM,
        "gauge",
        ("group",),
        "Problem of this group's reader: 1 if it cannot apply updates; `hps updates status` shows "
        "the reason.",
    ),
)

GROUPS: Mapping[str, tuple[MetricSpec, ...]] = {
    "Processes": _PROCESSES,
    "Requests": _REQUESTS,
    "Models": (*MODELS, *TRAFFIC, *DOWNLOADS),
    "Batches on GPUs": SCHEDULER,
    "Lookups": _LOOKUPS,
    "Tiers and caches": _TIERS,
    "Updates": _UPDATES,
}
METRICS: tuple[MetricSpec, ...] = tuple(spec for group in GROUPS.values() for spec in group)
