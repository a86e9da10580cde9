"""Table of all metrics; docs/metrics.md is generated from it (`hps.observability.metric_page`)."""

from __future__ import annotations

from collections.abc import Mapping

from hps.observability import metric_names as m
from hps.observability.metric_spec import AGE_BUCKETS, BATCH_BUCKETS, SCORE_BUCKETS, MetricSpec

_PROCESSES = (
    MetricSpec(m.BUILD_INFO, "gauge", ("version", "native"), "Always 1; what is running."),
    MetricSpec(
        m.READY,
        "gauge",
        ("role",),
        "Whether this process takes requests, or feeds stores: 1 when /v2/health/ready says so; role=node, "
        "frontend, lookup or ingest; role=worker: how many workers do.",
    ),
    MetricSpec(m.UPTIME, "gauge", (), "Seconds since the node was opened."),
    MetricSpec(
        m.PROCESS_CPU,
        "counter",
        ("process",),
        "CPU time that processes took, in seconds; process=worker: all workers together.",
    ),
    MetricSpec(
        m.PROCESS_MEMORY,
        "gauge",
        ("process", "kind"),
        "Memory that is resident; kind=anonymous (a process's own), file, or shared, which counts for each "
        "process that has touched it.",
    ),
    MetricSpec(
        m.MEMORY_USED,
        "gauge",
        (),
        "Memory that is taken in the container, by all of its processes, and that cannot be had back: caches "
        "of files are left out. Without a container's limit, of the machine.",
    ),
    MetricSpec(
        m.MEMORY_LIMIT,
        "gauge",
        (),
        "How much may be taken before a process is killed: the container's limit, else the machine's memory.",
    ),
    MetricSpec(
        m.CERTIFICATE_EXPIRY,
        "gauge",
        ("setting",),
        "Until when the certificates of the file that the setting names are valid, in seconds since 1970: "
        "the first that ends, of roots the last.",
    ),
    MetricSpec(m.WORKERS, "gauge", (), "Worker processes that answer requests at the moment."),
    MetricSpec(
        m.WORKER_RESTARTS,
        "counter",
        (),
        "Worker processes that ended by themselves, or were killed because they did not answer, and were "
        "replaced.",
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
        "empty where the request named none that is served.",
    ),
    MetricSpec(
        m.REQUESTS_REFUSED,
        "counter",
        ("reason",),
        "Requests refused before they were looked at; of an overloaded server reason=queue_full, queue_wait "
        "or queue_bytes, of a client that asks too much client_running or client_rate, of a caller without "
        "the right key unauthenticated or forbidden; else too_large or unavailable.",
    ),
    MetricSpec(
        m.RUNNING_REQUESTS,
        "gauge",
        ("model",),
        "Inference requests that are worked at, without those that memory answers at once.",
    ),
    MetricSpec(
        m.RUNNING_LIMIT,
        "gauge",
        ("model",),
        "How many inference requests may be worked at at a time; others wait.",
    ),
    MetricSpec(
        m.QUEUE_REQUESTS, "gauge", ("model",), "Inference requests that wait for their turn."
    ),
    MetricSpec(
        m.QUEUE_BYTES,
        "gauge",
        (),
        "Bytes of inference requests that wait, and of those whose bodies are still coming.",
    ),
    MetricSpec(
        m.QUEUE_SECONDS,
        "histogram",
        ("model",),
        "Time that inference requests waited for their turn, those that need not wait left out.",
    ),
    MetricSpec(
        m.BATCH_REQUESTS,
        "histogram",
        ("model",),
        "Requests answered together (server.batching); those that found nothing under way left out.",
        BATCH_BUCKETS,
    ),
    MetricSpec(
        m.STALE_ANSWERS,
        "counter",
        ("model", "result"),
        "Requests while updates had been waiting for longer than updates.max_staleness_s; result=flagged or "
        "refused.",
    ),
)

_MODELS = (
    MetricSpec(m.MODEL_VERSION, "gauge", ("model",), "Version of the model that is being served."),
    MetricSpec(
        m.MODEL_LOADS,
        "counter",
        ("model", "result"),
        "Versions that a serving node was told to load; result=served or failed, when the former one is "
        "served on.",
    ),
    MetricSpec(
        m.FEATURE_KEYS,
        "counter",
        ("model", "version", "feature", "result"),
        "Keys of each feature, or of the table where a request names tables; result=found, or defaulted: no "
        "tier had a row. Their ratio is the share of unknown keys.",
    ),
    MetricSpec(
        m.DENSE_SECONDS, "histogram", ("model", "version"), "Time of one run of the dense model."
    ),
    MetricSpec(m.DENSE_WAITING, "gauge", (), "Runs of dense models waiting for a thread."),
    MetricSpec(
        m.DENSE_FALLBACKS,
        "counter",
        ("model",),
        "Runs of the dense model in this process because Triton, which was to run them, was not available.",
    ),
    MetricSpec(
        m.SCORES,
        "histogram",
        ("model", "version", "output"),
        "Values of the dense model's outputs that have one number per sample. Values below 0 make their sum "
        "fall, so for a mean there is hps_scores_absolute_total.",
        SCORE_BUCKETS,
    ),
    MetricSpec(
        m.SCORES_ABSOLUTE,
        "counter",
        ("model", "version", "output", "sign"),
        "Sum of the values that hps_scores has, each without its sign; sign=positive or negative. The rate "
        "of the one less that of the other, by that of hps_scores_count, is the mean.",
    ),
    MetricSpec(
        m.SCORES_NOT_FINITE,
        "counter",
        ("model", "version", "output"),
        "Output values of the dense model that were NaN or infinite; they are served as they are.",
    ),
)

_LOOKUPS = (
    MetricSpec(
        m.LOOKUP_KEYS,
        "counter",
        ("model", "version", "table", "tier"),
        "Keys answered, by the tier that had the row; tier=default: no tier had it, tier=remote: a lookup "
        "node was asked, which tells the rest.",
    ),
    MetricSpec(
        m.LOOKUP_SECONDS, "histogram", ("model", "version"), "Time of one lookup of all its tables."
    ),
    MetricSpec(
        m.LOOKUP_DEGRADED,
        "counter",
        ("model", "tier"),
        "Lookups that were answered without this tier because it was broken, late or full.",
    ),
    MetricSpec(m.LOOKUP_WAITING, "gauge", (), "Lookups waiting for a thread to ask a store."),
    MetricSpec(
        m.LOOKUP_SHARED,
        "counter",
        (),
        "Keys that a lookup did not ask the stores for because another one was doing so.",
    ),
    MetricSpec(
        m.LOOKUP_NODE_UP,
        "gauge",
        ("address",),
        "Whether this front end sends lookups to the lookup node: 0 while it does not answer, is not ready, "
        "or is left out because lookups fail there.",
    ),
    MetricSpec(
        m.LOOKUP_NODE_RUNNING,
        "gauge",
        ("address",),
        "Lookups of this front end that are under way at the lookup node.",
    ),
    MetricSpec(
        m.LOOKUP_NODE_REQUESTS,
        "counter",
        ("address", "code"),
        "Lookups that this front end sent to the lookup node, by gRPC's status; retries count, too.",
    ),
    MetricSpec(
        m.LOOKUP_NODE_RETRIES,
        "counter",
        ("address",),
        "Lookups that another lookup node was asked for because this one was not available.",
    ),
    MetricSpec(
        m.LOOKUP_NODE_EJECTIONS,
        "counter",
        ("address",),
        "How often the lookup node was left out for a while because lookups failed there.",
    ),
)

_TIERS = (
    MetricSpec(
        m.TIER_KEYS,
        "counter",
        ("tier", "model", "version", "table", "result"),
        "Keys a tier was asked for; result=found or missed, their ratio is the hit rate, or skipped: the "
        "tier was passed over. Repeated keys of a request count once, but where memory answered all of "
        "it they all count.",
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
        "Fetches that passed over a tier; reason=open (its circuit), failed, late, full (all of its "
        "threads were busy), no_time (the request's deadline had passed), refused (some rows: tables that do "
        "not fit, damaged files).",
    ),
    MetricSpec(
        m.TIER_AVAILABLE,
        "gauge",
        ("tier",),
        "Whether lookups ask the tier: 0 while its circuit is open or being tried again.",
    ),
    MetricSpec(
        m.TIER_FACT,
        "gauge",
        ("tier", "fact"),
        "What a tier states of itself. Of redis: reachable (1 or 0). Of rocksdb: table_bytes, free_bytes "
        "(of its disk), min_free_bytes (below which it takes no writes), pending_compaction_bytes, "
        "running_compactions, writes_stopped (1: writes wait for compactions), delayed_write_rate (bytes/s; "
        "0: not slowed down), background_errors, stalled_seconds (that writes have waited), lost_writes "
        "(acknowledged ones that the start found missing, at most so many), damaged_files (found since). "
        "Of gpu: bytes (of its caches, on each device), pinned_host_bytes, static_tables.",
    ),
    MetricSpec(
        m.TABLE_ROWS,
        "gauge",
        ("tier", "model", "version", "table"),
        "Rows a tier holds of a table. Of rocksdb exact until the table is written to, then about: added "
        "rows count once they are compacted. Kept deletions count, in redis, too.",
    ),
    MetricSpec(
        m.TABLE_CAPACITY,
        "gauge",
        ("tier", "model", "version", "table"),
        "Rows a tier can hold of a table, where it is bounded.",
    ),
    MetricSpec(
        m.TABLE_BYTES,
        "gauge",
        ("tier", "model", "version", "table"),
        "Bytes a tier holds of a table, where it knows that.",
    ),
    MetricSpec(
        m.PROMOTIONS,
        "counter",
        ("tier", "result"),
        "Keys to be copied into a tier: inserted, gone (no store has them any more), degraded (a "
        "store could not be asked), dropped (the queue was full), failed.",
    ),
    MetricSpec(m.PROMOTE_QUEUE, "gauge", ("tier",), "Keys waiting to be copied into a tier."),
    MetricSpec(
        m.GPU_MEMORY_USED,
        "gauge",
        ("gpu", "uuid"),
        "Memory of a GPU that is taken, by whatever process.",
    ),
    MetricSpec(m.GPU_MEMORY_TOTAL, "gauge", ("gpu", "uuid"), "Memory of a GPU."),
)

_UPDATES = (
    MetricSpec(
        m.UPDATE_ROWS,
        "counter",
        ("model", "table", "result"),
        "Rows that update streams brought: upserted, deleted, expired (their time to live was over), "
        "not_finite (NaN or infinite; the row that was there stays).",
    ),
    MetricSpec(
        m.UPDATE_BATCH,
        "histogram",
        (),
        "Time that one batch of updates took to be in all stores and caches, waits for a store included.",
    ),
    MetricSpec(
        m.UPDATE_DEAD,
        "counter",
        ("reason",),
        "Update messages that could not be taken, each counted once, however often it is read; see the dead "
        "letters.",
    ),
    MetricSpec(
        m.UPDATE_LOST,
        "counter",
        ("group", "topic"),
        "Update messages that Kafka had dropped, by the topic's retention, before a group's reader here "
        "applied them; stores lack their rows.",
    ),
    MetricSpec(
        m.UPDATE_RESTARTED,
        "counter",
        ("group", "topic"),
        "Partitions that a group's reader here read from their beginning again, as the stores were ahead of "
        "them: the topic was deleted and created again, or Kafka lost messages.",
    ),
    MetricSpec(
        m.UPDATE_VISIBLE,
        "histogram",
        ("model", "table", "tier"),
        "Age of updates, since they were made, when a tier had them; one observation per message.",
        AGE_BUCKETS,
    ),
    MetricSpec(
        m.UPDATE_AGE,
        "gauge",
        ("model", "table"),
        "How old rows of a table may be: 0 when all updates are applied, else the time since the first came "
        "that is not; of those that waited at the start, since the newest applied one was made.",
    ),
    MetricSpec(
        m.UPDATE_LAG,
        "gauge",
        ("group", "topic", "partition"),
        "Update messages that are there and that a group's reader here has not polled yet.",
    ),
    MetricSpec(
        m.UPDATE_PAUSED,
        "gauge",
        ("group",),
        "Whether a group's reader was paused (`hps updates pause`).",
    ),
    MetricSpec(
        m.UPDATE_PROBLEM,
        "gauge",
        ("group",),
        "Whether something keeps a group's reader from applying updates; `hps updates status` says what.",
    ),
)

GROUPS: Mapping[str, tuple[MetricSpec, ...]] = {
    "Processes": _PROCESSES,
    "Requests": _REQUESTS,
    "Models": _MODELS,
    "Lookups": _LOOKUPS,
    "Tiers and caches": _TIERS,
    "Updates": _UPDATES,
}
METRICS: tuple[MetricSpec, ...] = tuple(spec for group in GROUPS.values() for spec in group)
