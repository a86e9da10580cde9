"""The Redis tier; see ``tier.py``.

In reading order: ``layout`` (keys, values and scripts), ``host_resolver``, ``connection`` and
``commands`` (the protocol), ``topology``, ``servers`` and ``client`` (server selection), ``tables``
(open tables), ``rows`` (reads), ``writes``, ``load``, ``maintenance``."""

from hps.tiers.redis.tier import RedisTier

__all__ = ["RedisTier"]
