"""Every metric of the product, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Sub-millisecond first: a lookup from memory takes tens of microseconds.
SECONDS_BUCKETS = (
    10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25,
    0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
# From one machine's memory to a stream that waited for a day.
AGE_BUCKETS = (
    5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0,
    86_400.0,
)  # fmt: skip

BATCH_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: its name, what its labels are, one sentence on what it counts, a histogram's buckets."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = SECONDS_BUCKETS


BUILD_INFO = "hps_build_info"
UPTIME = "hps_uptime_seconds"
WORKERS = "hps_workers"
WORKER_RESTARTS = "hps_worker_restarts_total"
REQUEST_SECONDS = "hps_request_duration_seconds"
REQUESTS_REFUSED = "hps_requests_refused_total"
RUNNING_REQUESTS = "hps_running_requests"
QUEUE_REQUESTS = "hps_queue_requests"
QUEUE_BYTES = "hps_queue_bytes"
QUEUE_SECONDS = "hps_queue_wait_seconds"
BATCH_REQUESTS = "hps_batch_requests"
LOOKUP_KEYS = "hps_lookup_keys_total"
LOOKUP_SECONDS = "hps_lookup_duration_seconds"
LOOKUP_DEGRADED = "hps_lookup_degraded_total"
STALE_ANSWERS = "hps_stale_answers_total"
LOOKUP_WAITING = "hps_lookup_waiting"
LOOKUP_SHARED = "hps_lookup_shared_keys_total"
TIER_KEYS = "hps_tier_keys_total"
TIER_SECONDS = "hps_tier_fetch_seconds"
TIER_SKIPPED = "hps_tier_skipped_total"
TABLE_ROWS = "hps_table_rows"
TIER_FACT = "hps_tier_fact"
PROMOTIONS = "hps_promotions_total"
PROMOTE_QUEUE = "hps_promote_queue_keys"
DENSE_SECONDS = "hps_dense_duration_seconds"
DENSE_WAITING = "hps_dense_waiting"
SCORES_NOT_FINITE = "hps_scores_not_finite_total"
DENSE_FALLBACKS = "hps_dense_fallbacks_total"
MODEL_VERSION = "hps_model_version"
UPDATE_ROWS = "hps_update_rows_total"
UPDATE_DEAD = "hps_update_dead_letters_total"
UPDATE_VISIBLE = "hps_update_visible_seconds"
UPDATE_AGE = "hps_update_age_seconds"
UPDATE_LAG = "hps_update_lag_messages"

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(BUILD_INFO, "gauge", ("version", "native"), "Always 1; what is running."),
    MetricSpec(UPTIME, "gauge", (), "Seconds since the node was opened."),
    MetricSpec(MODEL_VERSION, "gauge", ("model",), "Version of the model that is being served."),
    MetricSpec(WORKERS, "gauge", (), "Worker processes that answer requests at the moment."),
    MetricSpec(
        WORKER_RESTARTS,
        "counter",
        (),
        "Worker processes that ended by themselves and were replaced.",
    ),
    MetricSpec(
        REQUEST_SECONDS,
        "histogram",
        ("protocol", "method", "model", "code"),
        "Time from a request's last byte to its answer's first, by protocol status.",
    ),
    MetricSpec(
        REQUESTS_REFUSED,
        "counter",
        ("reason",),
        "Requests refused before they were looked at; of an overloaded server reason=queue_full, queue_wait "
        "or queue_bytes, of a client that asks too much client_running or client_rate.",
    ),
    MetricSpec(
        RUNNING_REQUESTS,
        "gauge",
        ("model",),
        "Inference requests that are worked at, without those that memory answers at once.",
    ),
    MetricSpec(QUEUE_REQUESTS, "gauge", ("model",), "Inference requests that wait for their turn."),
    MetricSpec(
        QUEUE_BYTES,
        "gauge",
        (),
        "Bytes of inference requests that wait, and of those whose bodies are still coming.",
    ),
    MetricSpec(
        QUEUE_SECONDS,
        "histogram",
        ("model",),
        "Time that inference requests waited for their turn, those that need not wait left out.",
    ),
    MetricSpec(
        BATCH_REQUESTS,
        "histogram",
        ("model",),
        "Requests answered together (server.batching); those that found nothing under way left out.",
        BATCH_BUCKETS,
    ),
    MetricSpec(
        LOOKUP_KEYS,
        "counter",
        ("model", "table", "tier"),
        "Keys answered, by the tier that had the row; tier=default: no tier had it.",
    ),
    MetricSpec(LOOKUP_SECONDS, "histogram", ("model",), "Time of one lookup of all its tables."),
    MetricSpec(
        LOOKUP_DEGRADED,
        "counter",
        ("model", "tier"),
        "Lookups that were answered without this tier because it was broken, late or full.",
    ),
    MetricSpec(
        STALE_ANSWERS,
        "counter",
        ("model", "result"),
        "Requests while updates had been waiting for longer than updates.max_staleness_s; result=flagged or "
        "refused.",
    ),
    MetricSpec(
        LOOKUP_SHARED,
        "counter",
        (),
        "Keys that a lookup did not ask the stores for because another one was doing so.",
    ),
    MetricSpec(LOOKUP_WAITING, "gauge", (), "Lookups waiting for a thread to ask a store."),
    MetricSpec(
        TIER_KEYS,
        "counter",
        ("tier", "model", "table", "result"),
        "Keys a tier was asked for; result=found or missed, their ratio is the hit rate, or skipped: the "
        "tier was passed over. Repeated keys of a request count once, but where memory answered all of "
        "it they all count.",
    ),
    MetricSpec(
        TIER_SKIPPED,
        "counter",
        ("tier", "reason"),
        "Fetches that passed over a tier; reason=open (its circuit), failed, late, full (all of its "
        "threads were busy), no_time (the request's deadline had passed), refused (tables that do not fit).",
    ),
    MetricSpec(
        TIER_SECONDS,
        "histogram",
        ("tier",),
        "Time of one fetch from one tier, for all tables of a batch.",
    ),
    MetricSpec(TABLE_ROWS, "gauge", ("tier", "model", "table"), "Rows a tier holds of a table."),
    MetricSpec(
        TIER_FACT,
        "gauge",
        ("tier", "fact"),
        "What a tier states of itself. Of rocksdb: table_bytes, free_bytes (of its disk), "
        "pending_compaction_bytes, running_compactions, writes_stopped (1: writes wait for compactions), "
        "delayed_write_rate (bytes/s they are slowed down to; 0: they are not), background_errors, "
        "stalled_seconds (that writes have waited since the start).",
    ),
    MetricSpec(
        PROMOTIONS,
        "counter",
        ("tier", "result"),
        "Keys to be copied into a tier: inserted, gone (no store has them any more), degraded (a "
        "store could not be asked), dropped (the queue was full), failed.",
    ),
    MetricSpec(PROMOTE_QUEUE, "gauge", ("tier",), "Keys waiting to be copied into a tier."),
    MetricSpec(DENSE_SECONDS, "histogram", ("model",), "Time of one run of the dense model."),
    MetricSpec(DENSE_WAITING, "gauge", (), "Runs of dense models waiting for a thread."),
    MetricSpec(
        DENSE_FALLBACKS,
        "counter",
        ("model",),
        "Runs of the dense model in this process because Triton, which was to run them, was not available.",
    ),
    MetricSpec(
        SCORES_NOT_FINITE,
        "counter",
        ("model", "output"),
        "Output values of the dense model that were NaN or infinite; they are served as they are.",
    ),
    MetricSpec(
        UPDATE_ROWS,
        "counter",
        ("model", "table", "result"),
        "Rows that update streams brought: upserted, deleted, expired (their time to live was over), "
        "not_finite (NaN or infinite; the row that was there stays).",
    ),
    MetricSpec(
        UPDATE_DEAD,
        "counter",
        ("reason",),
        "Update messages that could not be taken; see the dead letters.",
    ),
    MetricSpec(
        UPDATE_VISIBLE,
        "histogram",
        ("model", "table", "tier"),
        "Age of updates, since they were made, when a tier had them; one observation per message.",
        AGE_BUCKETS,
    ),
    MetricSpec(
        UPDATE_AGE,
        "gauge",
        ("model", "table"),
        "How old rows of a table may be: 0 when all updates are applied, else the time since the first came "
        "that is not; of those that waited at the start, since the newest applied one was made.",
    ),
    MetricSpec(
        UPDATE_LAG,
        "gauge",
        ("group", "topic", "partition"),
        "Update messages that are there and that a group's reader here has not polled yet.",
    ),
)
