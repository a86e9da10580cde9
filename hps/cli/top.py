"""``hps top``: how servers do at the moment, again and again."""

from __future__ import annotations

import math
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from hps.cli.output import (
    JsonOption,
    Number,
    Output,
    OutputFormat,
    age,
    console,
    count,
    print_json,
    table_of,
)
from hps.cli.targets import ADMIN, ApiKeyOption, NoServerOption, TlsOption, open_admin
from hps.errors import HpsError

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from hps.cli.rates import Reading
    from hps.client import Admin

app = typer.Typer(add_completion=False)

EXAMPLES = """\b
Examples:
  hps top
  hps top http://a:8002 http://b:8002 --interval 5
  hps top --once --output json
"""
_STYLES = {"ready": "green", "not ready": "yellow", "away": "bold red"}
_LONGEST_WAIT_S = 5.0
_OURS = "hps_"


@app.command(epilog=EXAMPLES)
def top(
    servers: Annotated[
        list[str] | None,
        typer.Argument(metavar="[URL]...", help="Admin addresses.", show_default=ADMIN),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look for one interval, print, leave; as in a pipe.")
    ] = False,
    _server: NoServerOption = None,
    api_key: ApiKeyOption = None,
    tls: TlsOption = None,
    output: Output = OutputFormat.table,
    json: JsonOption = False,
) -> None:
    """Watch servers: requests, latency, queues, tiers, freshness; q leaves.

    All numbers are of the last interval, quantiles are interpolated in the buckets of the server's metrics. A
    narrow terminal shows fewer columns. With --once, exit 1 when a server does not answer.
    """
    with ExitStack() as resources:
        watch = _Watch(servers or [ADMIN], interval, api_key, tls, resources)
        watch.look()
        if once or json or output is OutputFormat.json or not sys.stdout.isatty():
            time.sleep(interval)
            told = watch.look()
            if json or output is OutputFormat.json:
                print_json(told)
            else:
                console().print(_screen(told))
            raise typer.Exit(1 if any(each["state"] == "away" for each in told) else 0)
        if console().is_dumb_terminal:
            _rolling(watch, interval)
        _live(watch, interval)


class _Watch:
    """The servers, and what each told last."""

    def __init__(
        self,
        urls: Sequence[str],
        interval: float,
        api_key: str | None,
        tls: str | None,
        resources: ExitStack,
    ) -> None:
        from concurrent.futures import ThreadPoolExecutor

        wait_s = min(max(interval, 1.0), _LONGEST_WAIT_S)
        self._admins: list[Admin] = [
            resources.enter_context(open_admin(url, api_key, tls, timeout_s=wait_s)) for url in urls
        ]
        self._last: dict[Admin, Reading] = {}
        self._threads: Executor = resources.enter_context(ThreadPoolExecutor(len(urls)))

    def look(self) -> list[dict[str, Any]]:
        """How each server did since the last look; one that is away keeps none of the others waiting."""
        return list(self._threads.map(self._one, self._admins))

    def _one(self, admin: Admin) -> dict[str, Any]:
        from hps.cli.rates import Reading, account

        try:
            reading = Reading.of(time.monotonic(), admin.metrics())
        except HpsError as error:
            self._last.pop(admin, None)
            return {"server": admin.url, "state": "away", "problem": str(error)}
        if not any(name.startswith(_OURS) for name, _ in reading.values):
            problem = (
                f"{admin.url} has metrics, but none of hps; is it a server's admin address? It prints it "
                "when it starts, port 8002 unless configured otherwise"
            )
            return {"server": admin.url, "state": "away", "problem": problem}
        before, self._last[admin] = self._last.get(admin), reading
        told = account(before or reading, reading)
        state = "ready" if told.pop("ready") else "not ready"
        return {"server": admin.url, "state": state, "problem": "", **told}


def _rolling(watch: _Watch, interval: float) -> NoReturn:
    """For a terminal that cannot be drawn over: a look below the other, until Ctrl-C."""
    while True:
        time.sleep(interval)
        console().print(_screen(watch.look()))


def _live(watch: _Watch, interval: float) -> None:
    from rich.live import Live

    with _keys() as pressed, Live(_screen([]), console=console(), screen=True) as live:
        due = time.monotonic() + min(interval, 1.0)  # soon, for the first time
        while True:
            while (left := due - time.monotonic()) > 0:
                if pressed(left) in ("q", "Q"):
                    return
            live.update(_screen(watch.look()), refresh=True)
            due = time.monotonic() + interval


@contextmanager
def _keys() -> Iterator[Any]:
    """Gives what waits so long for a key and returns it, "" when none was pressed."""
    if not sys.stdin.isatty():

        def waited(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield waited
        return
    import termios
    import tty

    def pressed(seconds: float) -> str:
        readable, _, _ = select.select([sys.stdin], [], [], seconds)
        if not readable:
            return ""
        with suppress(OSError):
            return os.read(sys.stdin.fileno(), 1).decode("ascii", "replace") or "q"
        return "q"  # the terminal is gone

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


# -- what is shown ---------------------------------------------------------------------------------

_SERVER = (
    *("server", "state", "up for", "req/s", "err/s", "refused/s", "p50 ms", "p99 ms", "running", "queued"),
    *("keys/s", "default", "degraded/s", "update age", "lag"),
)  # fmt: skip
# What a narrow terminal does without, the first one first.
_LEFT_OUT = (
    *("degraded/s", "keys/s", "up for", "running", "lag", "skipped/s", "retries/s", "default"),
    *("refused/s", "p50 ms", "update age", "queued"),
)


def _screen(told: Sequence[Mapping[str, Any]]) -> Any:
    from rich.console import Group
    from rich.text import Text

    there = [each for each in told if each["state"] != "away"]
    width = console().width
    several = len(told) > 1

    def part(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
        """Of one server among several, which the last column names."""
        if not several:
            columns, rows = columns[:-1], [row[:-1] for row in rows]
        return table_of(*_fitting(columns, rows, width))

    nodes = [(*_node_row(row), each["server"]) for each in there for row in each["lookup_nodes"]]
    parts: list[Any] = [
        table_of(*_fitting(_SERVER, [_server_row(each) for each in told], width), styles=_STYLES),
        *(Text(f"{each['server']}: {each['problem']}", "red") for each in told if each["problem"]),
        Text(),
        part(
            ("model", "req/s", "err/s", "p50 ms", "p99 ms", "server"),
            [
                (row["model"], *_requests(row), each["server"])
                for each in there
                for row in each["models"]
                if row["requests_per_s"]
            ],
        ),
        Text(),
        part(
            ("tier", "keys/s", "hit rate", "p50 ms", "p99 ms", "skipped/s", "server"),
            [(*_tier_row(row), each["server"]) for each in there for row in each["tiers"]],
        ),
    ]
    if nodes:
        columns = ("lookup node", "state", "req/s", "err/s", "running", "retries/s", "server")
        parts += [Text(), part(columns, nodes)]
    return Group(*parts)


def _fitting(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], width: int
) -> tuple[list[str], list[list[Any]]]:
    """What fits into ``width``, as far as it can be done without."""
    kept = list(range(len(columns)))

    def needed() -> int:
        return sum(max(len(str(row[i])) for row in (columns, *rows)) + 2 for i in kept) - 2

    for name in _LEFT_OUT:
        if needed() <= width:
            break
        kept = [i for i in kept if columns[i] != name]
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _server_row(told: Mapping[str, Any]) -> tuple[Any, ...]:
    if told["state"] == "away":
        return told["server"], told["state"], *[Number("")] * 13
    requests, errors, *times = _requests(told)
    return (
        told["server"],
        told["state"],
        age(told["uptime_s"]),
        requests,
        errors,
        _number(told["refused_per_s"]),
        *times,
        count(int(told["running"])),
        count(int(told["queued"])),
        _number(told["keys_per_s"]),
        _share(told["defaulted"]),
        _number(told["degraded_per_s"]),
        Number("-" if told["age_s"] is None else f"{told['age_s']:.1f} s"),
        Number("-" if told["lag_messages"] is None else f"{told['lag_messages']:,.0f}"),
    )


def _requests(told: Mapping[str, Any]) -> tuple[Number, ...]:
    return (
        _number(told["requests_per_s"]),
        _number(told["errors_per_s"]),
        _ms(told["p50_s"]),
        _ms(told["p99_s"]),
    )


def _tier_row(tier: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        tier["tier"],
        _number(tier["keys_per_s"]),
        _share(tier["hit_rate"]),
        _ms(tier["p50_s"]),
        _ms(tier["p99_s"]),
        _number(tier["skipped_per_s"]),
    )


def _node_row(node: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        node["address"],
        "asked" if node["up"] else "not asked",
        _number(node["requests_per_s"]),
        _number(node["errors_per_s"]),
        count(int(node["running"])),
        _number(node["retries_per_s"]),
    )


def _number(value: float) -> Number:
    return Number(f"{value:,.1f}" if 0 < value < 100 else f"{value:,.0f}")


def _share(value: float | None) -> Number:
    return Number("-" if value is None else f"{100 * value:.1f} %")


def _ms(seconds: float | None) -> Number:
    if seconds is None:
        return Number("-")
    return Number("> all" if math.isinf(seconds) else f"{1000 * seconds:.3g}")
