"""The Redis tier; ``tier.py`` says what it keeps.

In reading order: ``layout`` (keys, values and scripts), ``names``, ``connection`` and ``commands`` (the
wire), ``topology``, ``nodes`` and ``client`` (which server), ``tables`` (what is open), ``rows`` (reads),
``writes``, ``load``, ``upkeep``.
"""

from hps.tiers.redis.tier import RedisTier

__all__ = ["RedisTier"]
