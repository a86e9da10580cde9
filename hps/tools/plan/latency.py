"""Latency of lookups by the keys of a request and the rows that it reads from a store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import ConfigError

Floats = NDArray[np.float64]
_STEPS = 100
_PARTS = ("redis", "gpu")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured latencies of lookups of ``keys`` keys, one at a time.

    ``misses (k,)``, ascending from 0: rows read from a store; ``p50_us (k,)``: the median latency with that
    many. ``key_us``: microseconds that a further key in memory takes. ``spread``: for each of them, quantiles
    of the latency divided by the median, from the smallest to the largest; or one for all. ``measured``: a
    phrase that says what was measured, for people. ``mapped_us``: the median latency of requests whose
    keys are all read from mapped files in memory; None: as from the cache. ``redis``: the same of lookups
    whose misses are read from Redis; None: not measured. ``gpu``: of lookups whose vectors stay on the GPU
    and whose misses are read from the CPU cache; None: not measured."""

    keys: float
    misses: tuple[float, ...]
    p50_us: tuple[float, ...]
    key_us: float = 0.0
    spread: tuple[tuple[float, ...], ...] = ((1.0,),)
    measured: str = ""
    mapped_us: float | None = None
    redis: Calibration | None = None
    gpu: Calibration | None = None

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.misses, self.misses[1:], strict=False))
        if (
            not self.misses
            or self.misses[0]
            or not ascending
            or len(self.misses) != len(self.p50_us)
        ):
            raise ValueError("misses must ascend from 0, with one p50_us for each")
        if min(*self.p50_us, self.mapped_us or 1.0) <= 0 or self.key_us < 0:
            raise ValueError("times must be positive")
        if len(self.spread) not in (1, len(self.misses)) or min(map(len, self.spread)) == 0:
            raise ValueError("spread must be one list of quantiles, or one for each of misses")

    def medians_us(
        self,
        keys: Floats,
        misses: Floats,
        mapped: Floats | None = None,
        *,
        misses_only: bool = False,
    ) -> Floats:
        """Return the typical latencies ``(n,)`` of requests of ``keys (n,)`` with ``misses (n,)``.

        ``mapped (n,)``: those of the keys that are read from mapped files in memory; None: no key.
        ``misses_only``: only what the misses add. Between measurements by proportion, beyond the last by
        the slope before it."""
        at, times = np.array(self.misses), np.array(self.p50_us)
        base = np.interp(misses, at, times)
        if len(at) > 1:
            slope = max(0.0, (times[-1] - times[-2]) / (at[-1] - at[-2]))
            base = base + slope * np.maximum(0.0, misses - at[-1])
        if misses_only:
            added: Floats = np.maximum(0.0, base - times[0])
            return added
        more = self.key_us * (keys - self.keys)
        if mapped is not None and self.mapped_us is not None:
            more = more + (self.mapped_us - self.p50_us[0]) / self.keys * mapped
        found: Floats = np.maximum(base + more, 0.1 * base)
        return found

    def spread_us(
        self,
        keys: Floats,
        misses: Floats,
        mapped: Floats | None = None,
        *,
        misses_only: bool = False,
    ) -> Floats:
        """Return the latencies of `medians_us`, each varied by ``spread``: ``(n, steps)``, ascending."""
        typical = self.medians_us(keys, misses, mapped, misses_only=misses_only)
        steps = np.linspace(0, 1, _STEPS + 1)
        spreads = [np.interp(steps, np.linspace(0, 1, len(s)), s) for s in self.spread]
        # The middle of each step, so that the largest of all does not stand for a whole step.
        factors = np.array([(spread[1:] + spread[:-1]) / 2 for spread in spreads])
        between = (np.array(self.misses)[1:] + np.array(self.misses)[:-1]) / 2
        nearest = (
            np.searchsorted(between, misses) if len(factors) > 1 else np.zeros(len(misses), int)
        )
        varied: Floats = typical[:, None] * factors[nearest]
        return varied

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Calibration:
        """Read a file of `save`, or written by hand: keys, misses, p50_us. Raises ConfigError."""
        try:
            data: dict[str, Any] = json.loads(path.read_text())
            return _calibration(data)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}: not a calibration: {error}; hps plan --save-calibration FILE writes one"
            ) from None


def _calibration(data: Mapping[str, Any]) -> Calibration:
    """Raises ValueError, TypeError or AttributeError for data of another form."""
    parts = {n: _calibration(data[n]) for n in _PARTS if data.get(n) is not None}
    return Calibration(**{name: _frozen(value) for name, value in data.items()} | parts)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
