"""``hps updates status | pause | resume | seek``: the readers of update streams in a running server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hps.cli.command_options import argument, option
from hps.cli.options import AdminServer, ReportOptions
from hps.tools.output import FormattedNumber, count, print_line, print_table, warn

STATUS_EXAMPLES = """\b
Examples:
  hps updates status
  hps updates status --server http://127.0.0.1:8002 --output json
"""
PAUSE_EXAMPLES = """\b
Examples:
  hps updates pause
  hps updates pause --group hps.shared
"""
SEEK_EXAMPLES = """\b
Examples:
  hps updates seek hps_updates.ctr 0 0      # apply all of partition 0 again
  hps updates seek hps_updates.ctr 3 81200      # continue at offset 81200
"""


@dataclass(frozen=True, kw_only=True)
class StreamOptions(ReportOptions):
    """Options of commands that control the update streams of a server."""

    group: str | None = option(None)
    """Only this group's reader; `hps updates status` lists them."""
    admin: AdminServer

    def send(self, command: str, **body: Any) -> None:
        """Send the command to the server, and report the streams afterwards."""
        self.report(_request(self.admin, f"/v1/updates/{command}", body), show)


def status(admin: AdminServer, options: ReportOptions) -> None:
    """Show a server's update streams: state, lag, problems."""
    options.report(_request(admin, "/v1/updates"), show)


def pause(options: StreamOptions) -> None:
    """Pause a server's update streams until `hps updates resume`. Nothing is lost: updates stay in Kafka."""
    options.send("pause", group=options.group)


def resume(options: StreamOptions) -> None:
    """Resume a server's paused update streams at their positions."""
    options.send("resume", group=options.group)


@dataclass(frozen=True, kw_only=True)
class SeekOptions(StreamOptions):
    topic: str = argument()
    """Topic, as `hps updates status` shows it."""
    partition: int = argument(min=0)
    """Number of the partition."""
    offset: int = argument(min=0)
    """Offset of the next message to read."""


def seek(options: SeekOptions) -> None:
    """Make a server read a partition from another offset.

    Applying messages again is harmless: newer rows are kept; in HPS's layouts the last write wins."""
    options.send(
        "seek",
        topic=options.topic,
        partition=options.partition,
        offset=options.offset,
        group=options.group,
    )


def _request(
    admin: AdminServer, path: str, body: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    with admin.open() as client:
        return list(client.ask(path, body)["updates"])


def show(streams: list[dict[str, Any]]) -> None:
    """Print the readers of update streams."""
    if not streams:
        print_line("This server reads no updates; set updates.kafka or updates.directory.")
        return
    _show_readers(streams)
    _show_partitions(streams)
    for each in streams:
        if not each["partitions"] and not each["problem"]:
            print_line(
                f"{each['group']}: no topic of its models exists yet (hps_updates.<model>, "
                "hps_et.<model>.<table>); "
                "a new one is noticed within 10 s"
            )
        if each["problem"]:
            warn(f"{each['group']}: {each['problem']}")


def _show_readers(streams: list[dict[str, Any]]) -> None:
    print_table(
        ("group", "source", "state", "writes", "behind"),
        [
            (
                each["group"],
                each["source"],
                each["state"],
                ", ".join([*each["stores"], "caches"] if each["caches"] else each["stores"]),
                count(each["lag"]),
            )
            for each in streams
        ],
    )


def _show_partitions(streams: list[dict[str, Any]]) -> None:
    """Print the lag of Kafka's partitions, and the age of tables."""
    rows = [
        (each["group"], part["topic"], FormattedNumber(str(part["partition"])), count(part["lag"]))
        for each in streams
        for part in each["partitions"]
    ]
    if rows:
        print_line()
        print_table(("group", "topic", "partition", "behind"), rows)
    tables = [
        (
            each["group"],
            f"{table['model']}/{table['table']}",
            FormattedNumber(f"{table['age_s']:.1f} s"),
        )
        for each in streams
        for table in each["tables"]
    ]
    if tables:
        print_line()
        print_table(("group", "table", "age"), tables)
