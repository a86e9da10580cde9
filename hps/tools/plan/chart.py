"""Plot of hit rates by capacity: SVG without a library, PNG with Matplotlib if it is installed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from hps.errors import ConfigError

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 190, 36, 52
_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00",
    "#56b4e9", "#000000", "#8c564b", "#7f7f7f", "#bcbd22",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: ``points`` are bytes (above 0) and hit rates; ``chosen``: the planned one of them.

    ``mapped``: a mapped file in memory is planned, which is drawn as a square."""

    name: str
    points: Points
    chosen: tuple[float, float] | None = None
    mapped: bool = False


def save_chart(path: Path, title: str, lines: Sequence[Line]) -> None:
    """Write a chart of ``lines`` to ``path``, an ``.svg`` or ``.png``. Raises ConfigError."""
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise ConfigError(f"--plot {path}: name it .svg or .png")
    if kind == ".png":
        _save_png(path, title, lines)
        return
    path.write_text(svg(title, lines))


def svg(title: str, lines: Sequence[Line]) -> str:
    """Return the chart as SVG: bytes on a logarithmic axis, hit rate from 0 to 100 %."""
    sizes = [x for line in lines for x, _ in line.points]
    sizes += [line.chosen[0] for line in lines if line.chosen and line.mapped]
    low, high = (math.log10(min(sizes)), math.log10(max(sizes))) if sizes else (0.0, 1.0)
    axes = _Axes(low, max(high, low + 1e-9))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
        *axes.drawn(),
    ]
    for number, line in enumerate(lines):
        parts += _drawn(line, axes, number)
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True, slots=True)
class _Axes:
    """Positions in the picture; ``low`` and ``high``: decimal logarithms of the bytes."""

    low: float
    high: float

    def x(self, size: float) -> float:
        part = (math.log10(size) - self.low) / (self.high - self.low)
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    def y(self, rate: float) -> float:
        return _TOP + (1 - rate) * (_HEIGHT - _TOP - _BOTTOM)

    def drawn(self) -> Iterator[str]:
        """The grid, with its labels."""
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        for per_cent in range(0, 101, 20):
            y = self.y(per_cent / 100)
            yield f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#ddd"/>'
            yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{per_cent} %</text>'
        for power in range(math.ceil(self.low), math.floor(self.high) + 1):
            x = self.x(10.0**power)
            yield f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#ddd"/>'
            label = size_label(10**power)
            yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>'
        middle = (_LEFT + right) / 2
        yield f'<text x="{middle:.0f}" y="{bottom + 38}" text-anchor="middle">bytes of the CPU cache</text>'


def _drawn(line: Line, axes: _Axes, number: int) -> Iterator[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    path = " ".join(f"{axes.x(size):.1f},{axes.y(rate):.1f}" for size, rate in line.points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    if line.chosen is not None and line.chosen[0] > 0:
        x, y = axes.x(line.chosen[0]), axes.y(line.chosen[1])
        if line.mapped:
            yield f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" fill="{colour}"/>'
        else:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>'
    y = _TOP + 8 + 18 * number
    left = _WIDTH - _RIGHT + 14
    yield f'<path d="M{left} {y}h18" stroke="{colour}" stroke-width="3"/>'
    yield f'<text x="{left + 24}" y="{y + 4}">{escape(line.name)}</text>'


def size_label(size: float) -> str:
    """Decimal bytes: 1 kB, 10 MB."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if size >= 10**power:
            return f"{size / 10**power:g} {unit}"
    return f"{size:g} B"


def _save_png(path: Path, title: str, lines: Sequence[Line]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            f"--plot {path}: a .png needs Matplotlib: pip install 'hps-server[plot]'; .svg needs nothing"
        ) from None
    figure = Figure(figsize=(_WIDTH / 100, _HEIGHT / 100))
    axes = figure.add_subplot()
    for number, line in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot(*zip(*line.points, strict=True), label=line.name, color=colour)
        if line.chosen is not None:
            axes.plot(*line.chosen, "s" if line.mapped else "o", color=colour)
    axes.set(
        xscale="log", xlabel="bytes of the CPU cache", ylabel="hit rate", title=title, ylim=(0, 1)
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
