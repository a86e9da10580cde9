"""Metrics of models, their versions and networks."""

from __future__ import annotations

from hps.observability import metric_names as m
from hps.observability.metric_spec import SCORE_BUCKETS, MetricSpec

MODELS = (
    MetricSpec(m.MODEL_VERSION, "gauge", ("model",), "Current version of the model."),
    MetricSpec(m.MODEL_SERVED, "gauge", ("model", "version"), "Served versions; 1: current."),
    MetricSpec(m.MODEL_LABEL, "gauge", ("model", "label"), "Version with this label."),
    MetricSpec(
        m.MODEL_DENSE_SKEW,
        "gauge",
        ("model", "version"),
        "Dense version of the newest streamed row, minus the version of the network that uses it; above 0: "
        "rows are ahead.",
    ),
    MetricSpec(
        m.MODEL_STEP_SKEW,
        "gauge",
        ("model", "version"),
        "Training step of the newest streamed row, minus that of the network (step in the manifest's "
        "metadata).",
    ),
    MetricSpec(m.MODEL_SWITCHES, "counter", ("model", "reason"), "Changes of the current version."),
    MetricSpec(
        m.MODEL_WARM_UPS,
        "counter",
        ("model", "result"),
        "Warm-ups of versions by replayed requests, in each process; result=settled, timed_out after "
        "models.warm_up_s, or failed: no request could be replayed.",
    ),
    MetricSpec(
        m.MODEL_LOADS,
        "counter",
        ("model", "result"),
        "Versions loaded by a running node on request; result=served, or failed: the former one stays "
        "served.",
    ),
    MetricSpec(
        m.FEATURE_KEYS,
        "counter",
        ("model", "version", "feature", "result"),
        "Keys of each feature, or of the table if a request names tables; result=found, or defaulted: no "
        "tier had a row. Their ratio is the share of unknown keys.",
    ),
    MetricSpec(
        m.DENSE_SECONDS, "histogram", ("model", "version"), "Time of one run of the network."
    ),
    MetricSpec(m.DENSE_WAITING, "gauge", (), "Runs of networks waiting for a thread."),
    MetricSpec(
        m.DENSE_FALLBACKS,
        "counter",
        ("model",),
        "Runs of the network in this process because Triton was unavailable.",
    ),
    MetricSpec(
        m.SCORES,
        "histogram",
        ("model", "version", "output"),
        "Values of the network's outputs that have one number per sample. Values below 0 decrease the "
        "sum; use hps_scores_absolute_total for a mean.",
        SCORE_BUCKETS,
    ),
    MetricSpec(
        m.SCORES_ABSOLUTE,
        "counter",
        ("model", "version", "output", "sign"),
        "Sum of the absolute values in hps_scores; sign=positive or negative. The rate of positive minus "
        "that of negative, divided by that of hps_scores_count, is the mean.",
    ),
    MetricSpec(
        m.SCORES_NOT_FINITE,
        "counter",
        ("model", "version", "output"),
        "Output values of the network that were NaN or infinite; they are returned unchanged.",
    ),
)
