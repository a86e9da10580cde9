"""Output of commands: tables for people, JSON for programs; colours on a terminal only.

Results go to stdout; progress, warnings and errors go to stderr, so that a pipe carries results alone.
rich honours ``NO_COLOR``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Wide enough that a piped table is never wrapped; rich uses only what the columns need.
PIPE_WIDTH = 4096


def console(*, stderr: bool = False) -> Console:
    """A console on the current stdout or stderr; not cached, since tests replace them."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def problems(error: Exception) -> list[str]:
    """The messages of ``error``: one for each mistake of a configuration, else one."""
    return [str(problem) for problem in getattr(error, "problems", (error,))]


def print_problem(message: str) -> None:
    """Print an error on stderr, with cause and remedy; the lines of a message are joined."""
    _note("error", "bold red", message)


def warn(message: str) -> None:
    _note("warning", "yellow", message)


def _note(word: str, style: str, message: str) -> None:
    from rich.text import Text

    line = "; ".join(part.strip() for part in message.splitlines() if part.strip())
    out = console(stderr=True)
    out.print(Text.assemble((f"{word}:", style), " ", line), soft_wrap=True)


VERDICT_STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


def print_json(data: Any) -> None:
    """Print ``data`` as JSON; NumPy arrays and scalars, paths and integers up to 2^64-1 included.

    Indented on a terminal, one line in a pipe. NaN and infinities become null (JSON has none)."""
    import orjson

    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
    if sys.stdout.isatty():
        options |= orjson.OPT_INDENT_2
    sys.stdout.write(orjson.dumps(data, default=_plain, option=options).decode())
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy scalars and arrays that orjson does not convert
        return value.tolist()
    raise TypeError(f"cannot print {type(value).__name__} as JSON")


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    title: str = "",
    styles: Mapping[str, str] | None = None,
    optional: Sequence[str] = (),
) -> None:
    """Print aligned columns; numbers to the right.

    ``styles``: cell text -> rich style (terminals only). ``optional``: columns that a narrow terminal
    leaves out, the first one first."""
    console().print(table_of(columns, rows, title=title, styles=styles, optional=optional))


def table_of(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    title: str = "",
    styles: Mapping[str, str] | None = None,
    optional: Sequence[str] = (),
) -> Table:
    """The table that `print_table` prints."""
    from rich.table import Table
    from rich.text import Text

    columns, cells = _fitting(columns, [list(row) for row in rows], optional)
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    table.show_header = any(columns)
    for i, name in enumerate(columns):
        numeric = bool(cells) and all(
            isinstance(row[i], int | float | FormattedNumber) for row in cells
        )
        justify: Any = "right" if numeric else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=numeric)
    for row in cells:
        texts = ["" if cell is None else str(cell) for cell in row]
        table.add_row(*(Text(t, style=(styles or {}).get(t, "")) for t in texts))
    return table


def _fitting(
    columns: Sequence[str], rows: list[list[Any]], optional: Sequence[str]
) -> tuple[Sequence[str], list[list[Any]]]:
    """Drop ``optional`` columns until the table fits the terminal."""
    from rich.cells import cell_len

    width, kept = console().width, list(range(len(columns)))
    for name in optional:
        widest = [max(cell_len(str(row[i])) for row in (columns, *rows)) for i in kept]
        if sum(widest) + 2 * (len(kept) - 1) <= width:
            break
        kept = [i for i in kept if columns[i] != name]
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]


def print_line(text: str = "", style: str = "") -> None:
    """A line of prose on stdout, for people."""
    from rich.text import Text

    console().print(Text(text, style=style), soft_wrap=True)


class FormattedNumber(str):
    """A number formatted for people (1.2 MB, 3,000); tables align it to the right."""


def number(value: float | None, form: str = "{}") -> FormattedNumber:
    """Format a value; None is a dash."""
    return FormattedNumber("-" if value is None else form.format(value))


def count(value: int | None, *, about: bool = False) -> FormattedNumber:
    return approximate(number(value, "{:,}"), about=about)


def approximate(number: str, *, about: bool = True) -> FormattedNumber:
    """Format as approximate: ``~3,000`` if ``about``."""
    return FormattedNumber(f"~{number}" if about and number != "-" else number)


def plural(number: int, noun: str) -> str:
    """Number and noun: ``1 table``, ``2 tables``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(value: int | None) -> FormattedNumber:
    """Bytes in decimal units: 999 B, 1.2 kB, 34.5 MB."""
    if value is None:
        return FormattedNumber("-")
    number = float(value)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 999.5 or unit == "TB":
            break
        number /= 1000
    return FormattedNumber(f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}")


def percentage(part: float, whole: float) -> FormattedNumber:
    """``part`` of ``whole`` in per cent; a dash if ``whole`` is 0."""
    return FormattedNumber(f"{100 * part / whole:.1f} %" if whole else "-")


def age(seconds: float) -> FormattedNumber:
    """A time span in its largest two units: 12 s, 3 min 4 s, 2 h 10 min, 5 d 3 h."""
    whole = max(0, int(seconds))
    for unit, length, smaller, small in (
        ("d", 86_400, "h", 3_600),
        ("h", 3_600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= length:
            return FormattedNumber(f"{whole // length} {unit} {whole % length // small} {smaller}")
    return FormattedNumber(f"{whole} s")
