"""Two engines over the same rows: one that may take the fast path, and one that never does."""

import numpy as np

from hps.errors import BadRequest, DeadlineExceeded
from hps.lookup.base import Feature, LookupModel
from hps.lookup.engine import LookupEngine
from hps.tiers.base import TierInfo
from hps.tiers.chain import TierChain
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.wrappers import MeteredTier
from hps.types import EmbeddingTable, JaggedKeys, LookupRequest, Source
from tests.support.memory_tier import MemoryTier

ROWS = 50
USER = EmbeddingTable.make("user", 3, default=[-1, -2, -3])
ITEM = EmbeddingTable.make("item", 2, dtype=np.float16)
FEATURES = [
    Feature("user", USER, hotness=1, context=True),
    Feature("item", ITEM, key_offset=3, pooling="none"),
    Feature("shown", ITEM, key_offset=-5, pooling="mean"),
    Feature("bought", ITEM, pooling="sum", hotness=2),
]
MODEL = LookupModel(
    "m", 1, {"user": USER, "item": ITEM}, {f.name: f for f in FEATURES}, 64, max_keys=30_000
)


class Side:
    """An engine over a cache with rows 0…49 of both tables; row k begins with k."""

    def __init__(self, workers, fast, model=MODEL):
        self.cache = CpuCache({USER: 100, ITEM: 100})
        keys = np.arange(ROWS)
        for table in (USER, ITEM):
            rows = (keys[:, None] + np.arange(table.dim) / 4).astype(table.dtype)
            self.cache.insert(table, keys, rows, np.ones(ROWS, np.uint64))
        self.observed, self.finished = [], []
        metered = MeteredTier(self.cache, lambda counts, *_: self.observed.append(counts))
        store = MemoryTier(TierInfo("store", Source.ROCKSDB))
        caches = TierChain([metered])
        self.store, self.promoted = store, []
        self.engine = LookupEngine(
            model,
            caches,
            store,
            workers,
            lambda table, keys: self.promoted.append((table, keys.tolist())),
            _Meter(self),
        )
        assert self.engine._fast_path is not None
        if not fast:
            self.engine._fast_path = None


class _Meter:
    def __init__(self, side):
        self._side = side

    def finished(self, answers, seconds, degraded):
        assert seconds >= 0
        self._side.finished.append((answers, degraded))

    def finished_alike(self, answers):
        return lambda seconds: self.finished(answers, seconds, ())


def outcome(side, request):
    try:
        result = side.engine.lookup(request)
    except (BadRequest, DeadlineExceeded) as error:
        return type(error), str(error)
    return (
        list(result.vectors),
        [(v.dtype, v.shape, v.tobytes()) for v in result.vectors.values()],
        {name: source.tolist() for name, source in result.sources.items()},
        result.defaulted,
        result.degraded,
    )


def dense(**features):
    return LookupRequest(
        {name: JaggedKeys.dense(np.array(keys)) for name, keys in features.items()}
    )
