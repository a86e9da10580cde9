"""Table of the ``ps.json`` keys: those that HPS's parser reads, and their effect here.

``values.py`` reads files by it, and ``docs/ps-json.md`` is generated from it. To give a key an effect,
clear its ``ignored``."""
# ruff: noqa: E501 - one row per key reads better than one argument per line

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["bool", "int", "float", "text", "path", "enum", "list", "object"]
REQUIRED = object()


@dataclass(frozen=True, eq=False)
class PsKey:
    """One key. ``default`` is HPS's documented one (in words if HPS computes it); ``ignored`` is the reason
    why it has no effect.

    ``ignored_values`` is the warning for single values of an enum, by canonical name. ``aliases`` maps
    every spelling that HPS accepts to the canonical one; ``items`` is the type of a list's items.
    ``acts_with`` is the ``type`` of the section, or of the update source, with which the key has an
    effect although it is ignored with others. A number outside ``least`` and ``most``, which HPS accepts, is clamped with a
    warning."""

    section: str
    name: str
    kind: Kind
    default: Any
    meaning: str
    ignored: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored_values: Mapping[str, str] = field(default_factory=dict)
    items: Kind = "int"
    acts_with: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name


def _aliases(**spellings: str) -> dict[str, str]:
    """``canonical="a b"``: the canonical name and all other spellings."""
    return {s: name for name, others in spellings.items() for s in (name, *others.split())}


REDIS = "redis_cluster"
NO_REDIS = f"volatile_db.type is not {REDIS}"
NO_TLS = f"{NO_REDIS}, or enable_tls is false"
KAFKA = "kafka_message_queue"
NO_KAFKA = f"update_source.type is not {KAFKA}"
IMMEDIATE = "updates that have arrived are applied immediately, as one batch"
STREAM = "every request on a GPU runs on a stream of the node and waits for no other stream"
ONE_CACHE = "there is one GPU cache, which supports 64-bit keys and updates"
PINNED = (
    "static tables are in GPU memory; with tiers.gpu.host_bytes of their size, they are in pinned "
    "host memory"
)
DENSE = (
    "HugeCTR's dense networks are not run; export the network to ONNX and put it into a model "
    "repository"
)
REFRESH = "writes reach the caches immediately, so there is no periodic refresh"
SHARED = "multi_process_hash_map"
NOT_SHARED = f"volatile_db.type is not {SHARED}"
FUSED = (
    "tables of equal vector size are fused into one, `fused_embedding<i>`, as in HPS's databases and topics; "
    "requests still name the original tables. Their keys must not overlap, and they have one default"
)
FUSED_ALREADY = "all tables of a request are read in one batch"
SHARED_SIZE = "the size of the CPU cache follows from its rows"
BATCHED = "all keys of a request are read in one batch"
PRIVATE = "a name of HPS's Python API; in JSON the key is {}"
ONLY_STATIC = (
    "as in HPS only static tables have 8-bit values; for others import the model with "
    "`hps model import ps.json --rows float8_e4m3`"
)
FLOAT32_LAYOUT = "HPS's layout there holds float32 rows, not float8_e4m3"

VDB_TYPES = _aliases(
    disabled="disable none",
    hash_map="hashmap hash map",
    parallel_hash_map="parallel_hashmap parallel_hash parallel_map",
    multi_process_hash_map="multi_process_hashmap multi_process_hash multi_process_map",
    redis_cluster="redis",
)
PDB_TYPES = _aliases(disabled="disable none", rocks_db="rocksdb rocks")
SOURCE_TYPES = _aliases(null="none", kafka_message_queue="kafka_mq kafka")
POLICIES = _aliases(evict_random="random", evict_least_used="least_used", evict_oldest="oldest")
CACHE_TYPES = _aliases(dynamic="", static="", uvm="", stochastic="")
EVICTIONS = {"evict_random": "random", "evict_least_used": "lfu", "evict_oldest": "lru"}
"""Values of `tiers.cpu_cache.eviction`, by HPS's policies."""
HASH_MAPS = ("hash_map", "parallel_hash_map", "multi_process_hash_map")

V, P, U, M = "volatile_db", "persistent_db", "update_source", "models[]"
MAX_U64 = 2**64 - 1
FILTERS = ["^hps_.+$"]
ABOUT_FILTERS = (
    "Models that are updated, as regular expressions (`updates.kafka.models`); one list for all stores, so "
    "of both sections together. HPS's default matches no model; here it means all, as an absent list does."
)

# fmt: off
KEYS: tuple[PsKey, ...] = (
    PsKey("", "supportlonglong", "bool", True, "false: keys are unsigned 32-bit; of keys in files and requests the low 32 bits count (`key_dtype`)."),
    PsKey("", "fuse_embedding_table", "bool", False, f"With `rocks_db`, `redis_cluster` or Kafka: {FUSED}. Without these it has no effect, **warned**."),
    PsKey("", V, "object", None, "Absent: type `parallel_hash_map`."),
    PsKey("", P, "object", None, "Absent: type `disabled`."),
    PsKey("", U, "object", None, "Absent: type `null`."),
    PsKey("", "models", "list", REQUIRED, "The models to serve.", items="object"),

    PsKey(V, "type", "enum", "disabled", "Hash maps: rows are cached in host memory (`tiers.cpu_cache`), with `multi_process_hash_map` in shared memory, where workers and other processes attach to them ([workers.md](workers.md)). `redis_cluster`: rows are stored in that Redis, in HPS's layout (`tiers.redis`), and in a RocksDB of the same layout. The default applies to a block without `type`; without the block it is `parallel_hash_map`.",
          aliases=VDB_TYPES),
    PsKey(V, "address", "text", "127.0.0.1:7000", "Some nodes of the cluster, separated by commas (`tiers.redis.addresses`); HPS uses only the first one.", NO_REDIS, acts_with=REDIS),
    PsKey(V, "user_name", "text", "default", "`tiers.redis.username`.", NO_REDIS, acts_with=REDIS),
    PsKey(V, "password", "text", "", "`tiers.redis.password`.", NO_REDIS, acts_with=REDIS),
    PsKey(V, "num_partitions", "int", "min(16, hardware threads)", "Redis: number of partitions per table, the same as when it was filled (`tiers.redis.partitions`). Hash maps: times `overflow_margin`, the largest number of rows of a table in the CPU cache."),
    PsKey(V, "allocation_rate", "int", 256 << 20, "Bytes per value page.", "the CPU cache allocates all of its memory at the start"),
    PsKey(V, "shared_memory_size", "int", 16 << 30, "Bytes of the shared memory segment.", SHARED_SIZE),
    PsKey(V, "shared_memory_name", "text", "hctr_mp_hash_map_database", "Name of the segment (`tiers.cpu_cache.shared.name`).", NOT_SHARED, acts_with=SHARED),
    PsKey(V, "shared_memory_auto_remove", "bool", True, "The last process removes the segment.", "the process that owns the cache removes it at its end"),
    PsKey(V, "num_node_connections", "int", 5, "Connections to each node (`tiers.redis.connections`).", NO_REDIS, acts_with=REDIS, most=1024),
    PsKey(V, "max_batch_size", "int", 65_536, "Keys per transaction.", "all keys of a request are sent together, in commands small enough for the server to serve others in between"),
    PsKey(V, "enable_tls", "bool", False, "`tiers.redis.tls`. Unlike HPS, hps checks that the servers' certificates have the name.", NO_REDIS, acts_with=REDIS),
    PsKey(V, "tls_ca_certificate", "path", "cacertbundle.crt", "`tiers.redis.tls.ca`: a file or a folder. The default is used if the file exists.", NO_TLS, acts_with=REDIS),
    PsKey(V, "tls_client_certificate", "path", "client_cert.pem", "`tiers.redis.tls.certificate`. The default is used if the file exists.", NO_TLS, acts_with=REDIS),
    PsKey(V, "tls_client_key", "path", "client_key.pem", "`tiers.redis.tls.key`. The default is used if the file exists.", NO_TLS, acts_with=REDIS),
    PsKey(V, "tls_server_name_identification", "text", "redis.localhost", "`tiers.redis.tls.server_name`.", NO_TLS, acts_with=REDIS),
    PsKey(V, "overflow_margin", "int", MAX_U64, "Redis: largest number of entries per partition (`tiers.redis.overflow_margin`). Hash maps: the CPU cache holds at most this many rows per partition (`cache_rows` of the table, when its files are larger)."),
    PsKey(V, "overflow_policy", "enum", "evict_random", "Redis: `tiers.redis.overflow_policy`. Hash maps: the eviction of the tables that `overflow_margin` bounds (`cache_eviction` `random`, `lfu`, `lru`); absent: as `tiers.cpu_cache.eviction` says, `lru`.", aliases=POLICIES),
    PsKey(V, "overflow_resolution_target", "float", 0.8, "Share that stays after an eviction (`tiers.redis.overflow_resolution_target`).", "the CPU cache evicts row by row", acts_with=REDIS),
    PsKey(V, "initial_cache_rate", "float", 1.0, "Share of the rows that is put into Redis at start (`tiers.redis.initial_cache_rate`); HPS ignores it and always copies all.", "the CPU cache is filled up to its capacity at start", acts_with=REDIS, least=0, most=1),
    PsKey(V, "cache_missed_embeddings", "bool", False, "Copy rows found in RocksDB into Redis (`tiers.redis.cache_missed_embeddings`); default vectors are not, unlike in HPS.", "rows found in RocksDB are always copied into the CPU cache, default vectors are not", acts_with=REDIS),
    PsKey(V, "update_filters", "list", FILTERS, ABOUT_FILTERS, NO_KAFKA, items="text", acts_with=KAFKA),
    PsKey(V, "initialize_after_startup", "bool", True, "false: the CPU cache starts empty (`tiers.cpu_cache.warm`), and nothing is put into Redis at start. HPS does not read it from JSON."),

    PsKey(P, "type", "enum", "disabled", "`rocks_db`: the RocksDB at `path`, in HPS's layout (no versions: the last write wins).", aliases=PDB_TYPES,
          ignored_values={"disabled": "not as in HPS: every row is also stored in a RocksDB at tiers.rocksdb.path, because a cache evicts rows"}),
    PsKey(P, "path", "path", "<tmp>/rocksdb", "Folder of the database (`tiers.rocksdb.path`)."),
    PsKey(P, "num_threads", "int", 16, "Background threads of RocksDB (`tiers.rocksdb.threads`).", least=1),
    PsKey(P, "read_only", "bool", False, "Open read-only (`tiers.rocksdb.access`); nothing is loaded at start."),
    PsKey(P, "max_batch_size", "int", 65_536, "Keys per read.", BATCHED),
    PsKey(P, "update_filters", "list", FILTERS, ABOUT_FILTERS, NO_KAFKA, items="text", acts_with=KAFKA),
    PsKey(P, "initialize_after_startup", "bool", True, "false: the sparse files are not loaded, the database is served unchanged (`tiers.rocksdb.load`). HPS does not read it from JSON."),
    PsKey(P, "backend", "text", "", "Kind of database.", PRIVATE.format("type")),

    PsKey(U, "type", "enum", "null", f"`null`: no update source. `{KAFKA}`: `updates.kafka`; the nodes write Redis together, as in HPS (`shared_writer: nodes`).", aliases=SOURCE_TYPES),
    PsKey(U, "brokers", "text", "127.0.0.1:9092", "Kafka brokers (`updates.kafka.brokers`).", NO_KAFKA, acts_with=KAFKA),
    PsKey(U, "metadata_refresh_interval_ms", "int", 30_000, "Interval of the search for new topics (`topic.metadata.refresh.interval.ms` of `updates.kafka.options`); absent: every 10 s.", NO_KAFKA, acts_with=KAFKA),
    PsKey(U, "receive_buffer_size", "int", 262_144, "Largest message (`updates.kafka.max_message_bytes`); absent: 16 MiB.", NO_KAFKA, acts_with=KAFKA, most=1_000_000_000),
    PsKey(U, "poll_timeout_ms", "int", 500, "Idle time that flushes buffered keys.", IMMEDIATE),
    PsKey(U, "max_batch_size", "int", 8192, "Keys per insert.", IMMEDIATE),
    PsKey(U, "failure_backoff_ms", "int", 50, "Sleep before a repeated delivery.", "a store that rejects rows is retried after 0.1 s, then after up to 5 s"),
    PsKey(U, "max_commit_interval", "int", 32, "Messages between commits.", "the stores keep their stream positions with the rows"),

    PsKey(M, "model", "text", REQUIRED, "The model's name."),
    PsKey(M, "version", "int", 1, "Not a key of HPS, which ignores it: the number of the version that these files are. A running node reads the file again when it is asked to load the model ([above](#another-version-while-a-node-serves))."),
    PsKey(M, "sparse_files", "list", REQUIRED, "One folder (`key`, `emb_vector`) per table. Local folders only.", items="path"),
    PsKey(M, "dense_file", "path", "", "HugeCTR's dense weights.", DENSE),
    PsKey(M, "network_file", "path", "", "HugeCTR's network (HPS ignores it too).", DENSE),
    PsKey(M, "non_trainable_params_file", "path", "", "HugeCTR's dense weights.", DENSE),
    PsKey(M, "max_batch_size", "int", 64, "Largest number of samples per request."),
    PsKey(M, "gpucache", "bool", True, "true: a GPU cache if there is a GPU (`tiers.gpu`), alongside the CPU cache, both sized by `gpucacheper`. false: no GPU cache (`gpu_rows` 0); with a hash map the CPU cache may hold whole tables, otherwise there is none; lookups always wait for the store."),
    PsKey(M, "gpucacheper", "float", 0.2, "The GPU cache and the CPU cache hold this share of each table's rows (`tiers.gpu.share`, `tiers.cpu_cache.share`)."),
    PsKey(M, "hit_rate_threshold", "float", 0.9, "Above 1: miss policy `wait`. Otherwise `default_then_promote` with this `min_hit_rate`."),
    PsKey(M, "num_of_worker_buffer_in_pool", "int", 1, "Lookups at a time on each GPU (`tiers.gpu.workspaces`), if more than the default, four; of several models the largest counts.", most=64),
    PsKey(M, "num_of_refresher_buffer_in_pool", "int", 1, "Refresh workspaces.", REFRESH),
    PsKey(M, "cache_refresh_percentage_per_iteration", "float", 0.0, "Share of the cache refreshed in one step (in HPS 0 also turns the warm-up off; here `init_ec` does).", REFRESH),
    PsKey(M, "deployed_device_list", "list", [], "The GPUs, each with a copy of the cache (`tiers.gpu.devices`); of several models, all that are named. HPS requires it."),
    PsKey(M, "maxnum_catfeature_query_per_table_per_sample", "list", "no limit", "Largest number of keys per sample, per table (`max_hotness`); in `KEYS` at most this times `max_batch_size`. HPS requires it."),
    PsKey(M, "embedding_vecsize_per_table", "list", REQUIRED, "Values per row, per table (`dim`)."),
    PsKey(M, "default_value_for_each_table", "list", [], "Default vectors of unknown keys, per table; tables without an entry get 0.0 (HPS requires it).", items="float"),
    PsKey(M, "embedding_table_names", "list", "sparse_embedding0, sparse_embedding1, …", "The tables' names.", items="text"),
    PsKey(M, "maxnum_des_feature_per_sample", "int", 26, "Dense inputs of HugeCTR's network.", DENSE),
    PsKey(M, "refresh_delay", "float", 0.0, "Seconds until the first refresh.", REFRESH),
    PsKey(M, "refresh_interval", "int", 0, "Seconds between refreshes.", REFRESH),
    PsKey(M, "fuse_embedding_table", "bool", "the global one", "false: this model's tables are not fused although the file's are."),
    PsKey(M, "embedding_cache_type", "enum", "dynamic", "`dynamic`: a cache. `static`: whole tables in the GPU's memory, read-only (`gpu_static`), and in the CPU cache. `uvm`: whole tables, all but `gpucacheper` of their rows in pinned host memory (`tiers.gpu.host_bytes`).", aliases=CACHE_TYPES,
          ignored_values={"stochastic": "works like dynamic, in HPS too"}),
    PsKey(M, "use_static_table", "bool", False, "true: as `embedding_cache_type: static`."),
    PsKey(M, "use_context_stream", "bool", True, "Run on the framework's CUDA stream.", STREAM),
    PsKey(M, "use_hctr_cache_implementation", "bool", True, "Which of two GPU caches.", ONE_CACHE),
    PsKey(M, "thread_pool_size", "int", 16, "Threads that read the store (`tiers.lookup_threads`): at least one per hardware thread, as in HPS; of several models the largest counts."),
    PsKey(M, "init_ec", "bool", True, "false: the CPU cache starts empty (`tiers.cpu_cache.warm`), if all models have it."),
    PsKey(M, "enable_pagelock", "bool", False, "Static tables in pinned memory.", PINNED),
    PsKey(M, "fp8_quant", "bool", False, "true: static tables are stored as `float8_e4m3` in every tier, HPS's scheme ([row-formats.md](row-formats.md)); `sparse_files` stay float32. As in HPS it needs `embedding_cache_type: static`. With `rocks_db` or `redis_cluster` the rows stay float32, as HPS stores them there. Without effect it is **warned**."),
    PsKey(M, "label_dim", "int", 1, "Outputs of HugeCTR's network.", DENSE),
    PsKey(M, "slot_num", "int", 10, "Inputs of HugeCTR's network.", DENSE),
    PsKey(M, "use_mixed_precision", "bool", False, "HugeCTR's network in float16.", DENSE),
    PsKey(M, "scaler", "float", 1.0, "HugeCTR's loss scaling.", DENSE),
    PsKey(M, "use_algorithm_search", "bool", True, "HugeCTR's network.", DENSE),
    PsKey(M, "use_cuda_graph", "bool", True, "HugeCTR's network.", DENSE),
    PsKey(M, "i64_input_key", "bool", False, "Width of keys.", PRIVATE.format("supportlonglong, for all models")),
    PsKey(M, "model_name", "text", "", "The model's name.", PRIVATE.format("model")),
    PsKey(M, "max_batchsize", "int", 0, "Largest number of samples per request.", PRIVATE.format("max_batch_size")),
    PsKey(M, "dense_model_file", "path", "", "HugeCTR's dense weights.", PRIVATE.format("dense_file")),
    PsKey(M, "sparse_model_files", "list", [], "Folders of the tables.", PRIVATE.format("sparse_files"), items="path"),
    PsKey(M, "device_id", "int", 0, "GPU.", PRIVATE.format("deployed_device_list")),
    PsKey(M, "use_gpu_embedding_cache", "bool", True, "Use of a cache.", PRIVATE.format("gpucache")),
    PsKey(M, "cache_size_percentage", "float", 0.2, "Size of the cache.", PRIVATE.format("gpucacheper")),
)
# fmt: on


def keys_of(section: str) -> dict[str, PsKey]:
    return {key.name: key for key in KEYS if key.section == section}
