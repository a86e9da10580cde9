"""The Redis tier; see ``tier.py``.

In reading order: ``layout`` (keys, values and scripts), ``host_resolver``, ``connection`` (the
protocol), ``topology``, ``servers`` and ``client`` (server selection), ``tables``
(open tables), ``rows`` (reads), ``writes``, ``load``, ``maintenance``."""

from hps.tiers.redis.load import RedisLoadSource
from hps.tiers.redis.tier import RedisTier

__all__ = ["RedisLoadSource", "RedisTier"]
