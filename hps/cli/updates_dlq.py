"""``hps updates dlq``: show dead letters with their reasons; send them again."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import typer

from hps.cli.command_options import option
from hps.cli.options import ReportOptions
from hps.cli.updates_kafka import KafkaOptions
from hps.tools.output import age, plural, print_line, print_table, size, warn

if TYPE_CHECKING:
    from hps.updates.kafka.dead_letters import StoredDeadLetter

EXAMPLES = """\b
Examples:
  hps updates dlq --config hps.yaml
  hps updates dlq --brokers kafka:9092 --reason unknown_table --output json
  hps updates dlq --config hps.yaml --reason unknown_table --requeue
"""
_SHOWN = 20


class DeadLetterReason(StrEnum):
    truncated = "truncated"
    bad_magic = "bad_magic"
    unknown_version = "unknown_version"
    checksum = "checksum"
    row_size = "row_size"
    oversize = "oversize"
    malformed = "malformed"
    unknown_table = "unknown_table"
    ahead = "ahead"


@dataclass(frozen=True, kw_only=True)
class DeadLetterOptions(KafkaOptions):
    topic: str | None = option(None)
    """Topic of dead letters; default: updates.kafka.dead_letters."""
    reason: list[DeadLetterReason] | None = option(
        None, metavar="REASON", help=f"Only these: {', '.join(DeadLetterReason)}. Repeatable."
    )
    limit: int | None = option(None, "--limit", "-n", min=1)
    """Only the newest N letters."""
    again: bool = option(False, "--all")
    """Also show letters that were already sent again."""
    requeue: bool = option(False)
    """Send the letters again to their original topic and partition."""


def dlq(options: DeadLetterOptions) -> None:
    """Show dead letters: messages that could not be applied, and why.

    Fix the cause first: serve the missing table, correct the producer. Then --requeue sends them again.
    They are no longer listed, unless they fail again. They keep their timestamps, and so their
    versions."""
    from hps.updates.kafka.dead_letters import DeadLetterReader

    settings = options.kafka(options.read())
    if options.topic is not None:
        settings = settings.model_copy(update={"dead_letters": options.topic})
    with closing(DeadLetterReader(settings)) as box:
        found = [
            each
            for each in box.letters(again=options.again)
            if not options.reason or each.reason in options.reason
        ]
        matching = len(found)
        limit = options.limit
        if limit is None and not options.requeue and not options.as_json:
            limit = _SHOWN
        if limit is not None:
            found = found[-limit:]
        failed = box.requeue(found) if options.requeue else []
    if options.requeue:
        _report_requeued(found, failed, options)
    else:
        options.report(
            [asdict(each) for each in found],
            lambda _report: _show(found, matching, settings.dead_letters),
        )


def _show(letters: list[StoredDeadLetter], matching: int, topic: str) -> None:
    if not letters:
        print_line(f"No dead letters in {topic}")
        return
    now = time.time()
    print_table(
        ("reason", "table", "from", "at byte", "size", "age"),
        [
            (
                each.reason,
                each.table or "?",
                f"{each.topic}/{each.from_partition} at {each.from_offset}",
                each.at,
                size(each.size),
                age(now - each.unix_ms / 1000),
            )
            for each in letters
        ],
    )
    if matching > len(letters):
        print_line(f"The newest {len(letters)} of {matching:,}; --limit shows more")


def _report_requeued(
    letters: list[StoredDeadLetter],
    failed: list[tuple[StoredDeadLetter, str]],
    options: ReportOptions,
) -> None:
    sent = len(letters) - len(failed)
    wrong = [{**asdict(letter), "error": why} for letter, why in failed]
    options.report(
        {"requeued": sent, "failed": wrong},
        lambda _report: print_line(f"Sent {plural(sent, 'letter')} again"),
    )
    for letter, why in failed[:_SHOWN]:
        warn(
            f"{letter.topic}/{letter.from_partition} did not take offset {letter.from_offset}: {why}"
        )
    if failed:
        raise typer.Exit(1)
