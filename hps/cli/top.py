"""``hps top``: live metrics of servers."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from hps.cli.command_options import CommandApp, argument, option
from hps.cli.options import ADMIN, Credentials, JsonReportOptions, former_urls, open_admin
from hps.cli.top_screen import screen
from hps.errors import HpsError
from hps.tools.output import console

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from hps.cli.metric_rates import MetricsReading
    from hps.client import Admin

app = CommandApp(add_completion=False)

EXAMPLES = """\b
Examples:
  hps top
  hps top --server http://a:8002 --server http://b:8002 --interval 5
  hps top --once --output json
"""
_LONGEST_WAIT_S = 5.0
_OURS = "hps_"


@dataclass(frozen=True, kw_only=True)
class TopOptions(JsonReportOptions):
    urls: list[str] | None = argument(None, hidden=True)
    server: list[str] | None = option(None, "--server", "-s", metavar="URL", show_default=ADMIN)
    """A server's admin address; repeatable."""
    interval: float = option(2.0, min=0.1, max=3600)
    """Seconds between two updates of the screen."""
    once: bool = option(False)
    """Measure one interval, print it and exit; default if stdout is not a terminal."""
    credentials: Credentials


@app.command(epilog=EXAMPLES)
def top(options: TopOptions) -> None:
    """Watch servers: requests, latency, queues, tiers, freshness; press q to quit.

    All numbers are for the last interval. Quantiles are interpolated within the buckets of the server's
    histograms. A narrow terminal shows fewer columns. With --once, exit code 1: a server does not
    answer."""
    with ExitStack() as resources:
        urls = former_urls(options.server, options.urls) or [ADMIN]
        watch = _ServerWatch(urls, options.interval, options.credentials, resources)
        watch.read()
        if options.once or options.as_json or not sys.stdout.isatty():
            time.sleep(options.interval)
            report = watch.read()
            options.report(report, lambda report: console().print(screen(report)))
            raise typer.Exit(1 if any(each["state"] == "away" for each in report) else 0)
        if console().is_dumb_terminal:
            _rolling(watch, options.interval)
        _live(watch, options.interval)


class _ServerWatch:
    """Reads the metrics of several servers, and keeps the last reading of each."""

    def __init__(
        self,
        urls: Sequence[str],
        interval: float,
        credentials: Credentials,
        resources: ExitStack,
    ) -> None:
        from concurrent.futures import ThreadPoolExecutor

        wait_s = min(max(interval, 1.0), _LONGEST_WAIT_S)
        self._admins: list[Admin] = [
            resources.enter_context(open_admin(url, credentials, timeout_s=wait_s)) for url in urls
        ]
        self._last: dict[Admin, MetricsReading] = {}
        self._threads: Executor = resources.enter_context(ThreadPoolExecutor(len(urls)))

    def read(self) -> list[dict[str, Any]]:
        """Summarise each server since the last call; the servers are read in parallel."""
        return list(self._threads.map(self._one, self._admins))

    def _one(self, admin: Admin) -> dict[str, Any]:
        from hps.cli.metric_rates import MetricsReading, account

        try:
            reading = MetricsReading.of(time.monotonic(), admin.metrics())
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
        report = account(before or reading, reading)
        state = "ready" if report.pop("ready") else "not ready"
        return {"server": admin.url, "state": state, "problem": "", **report}


def _rolling(watch: _ServerWatch, interval: float) -> NoReturn:
    """Print one screen below the other until Ctrl-C, for terminals without cursor control."""
    while True:
        time.sleep(interval)
        console().print(screen(watch.read()))


def _live(watch: _ServerWatch, interval: float) -> None:
    from rich.live import Live

    with _keys() as pressed, Live(screen([]), console=console(), screen=True) as live:
        due = time.monotonic() + min(interval, 1.0)  # the first screen early
        while True:
            while (left := due - time.monotonic()) > 0:
                if pressed(left) in ("q", "Q"):
                    return
            live.update(screen(watch.read()), refresh=True)
            due = time.monotonic() + interval


@contextmanager
def _keys() -> Iterator[Any]:
    """Yield a function that waits some seconds for a key; it returns the key, or "" without one."""
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
        return "q"  # the terminal was closed

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
