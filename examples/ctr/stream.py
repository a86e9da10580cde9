"""``python -m examples.ctr.stream``: rows go into a serving node while they are trained.

A model is trained on the first impressions and served. Then the trainer goes on with the others, rows only,
and sends every row that changes through Kafka; on the way the node is asked for the scores of impressions
that are held out. See examples/README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import hps
from examples.ctr.data import Samples, read_csv, split
from examples.ctr.export import MODEL, publish
from examples.ctr.online import OnlineRows
from examples.ctr.training import DEFAULTS, Trained, auc, train
from hps.errors import HpsError, Unavailable
from hps.updates import Producer

SHARE = 0.15
"""Of the training split: what the served model has seen when the stream begins."""
BASE = replace(DEFAULTS, epochs=5, batch=256)
BATCH, ASK_EVERY = 256, 16
SERVED_WITHIN_S = 60.0
SAME = 1e-5
"""By how much served logits and the trainer's may differ: networks add up in different orders."""

Report = Callable[[str], None]
Ask = Callable[[Samples], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Measured:
    """After so many ``impressions`` and ``rows`` sent: the AUC of the held-out split as served, and how long
    after the last row was sent all rows were served."""

    impressions: int
    rows: int
    auc: float
    waited_s: float


def run(data: Path, brokers: str, folder: Path, seed: int, report: Report) -> list[Measured]:
    """Train, publish into the empty ``folder``, serve, stream. Raises HpsError; OSError or ValueError for
    the file."""
    samples = read_csv(data)
    parts = split(len(samples))
    first = int(len(parts.train) * SHARE)
    with Producer(brokers, model=MODEL) as producer:
        base = train(samples, replace(parts, train=parts.train[:first]), replace(BASE, seed=seed))
        publish(base, folder / "models", watermark=producer.watermark())
        settings = {
            "models": {"repository": str(folder / "models")},
            "tiers": {"rocksdb": {"path": str(folder / "rocksdb")}},
            "updates": {"kafka": {"brokers": brokers, "models": [MODEL]}},
        }
        with hps.open(settings) as node:
            report(f"trained on {first:,} impressions; serving")
            return stream(
                base,
                samples.take(parts.train[first:]),
                samples.take(parts.test),
                producer,
                lambda some: node.predict(MODEL, some.keys, some.inputs).outputs["logit"],
                report,
            )


def stream(
    base: Trained, coming: Samples, held_out: Samples, producer: Producer, ask: Ask, report: Report
) -> list[Measured]:
    """Learn from ``coming``, send what changes, and ``ask`` for logits (n,) or (n, 1) of ``held_out`` now and
    then. Raises Unavailable when what was sent is not served."""
    rows = OnlineRows(base)
    found: list[Measured] = []
    seen = sent = 0

    def measure() -> None:
        served, waited = _served(ask, held_out, rows.score(held_out))
        found.append(Measured(seen, sent, auc(held_out.clicked, served), waited))
        report(
            f"{seen:>7,} impressions, {sent:>7,} rows sent: served AUC {found[-1].auc:.4f}, "
            f"{waited:.2f} s after the last row"
        )

    measure()
    batches = -(-len(coming) // BATCH)
    for number, batch in enumerate(coming.batches(BATCH), start=1):
        for table, (keys, changed) in rows.learn(batch).items():
            sent += producer.send(table, keys, changed, step=number)
        seen += len(batch)
        if number % ASK_EVERY == 0 or number == batches:
            producer.flush()
            measure()
    return found


def _served(
    ask: Ask, samples: Samples, trained: NDArray[np.float32]
) -> tuple[NDArray[np.float32], float]:
    """Logits as they are served, once they are those of the trainer, and how long that took."""
    began = time.monotonic()
    while True:
        served = np.concatenate([ask(some).ravel() for some in samples.batches(1024)])
        waited = time.monotonic() - began
        if np.abs(served - trained).max() <= SAME:
            return served, waited
        if waited > SERVED_WITHIN_S:
            raise Unavailable(
                f"rows that were sent {SERVED_WITHIN_S:g} s ago are not served; see `hps updates status`"
            )


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="hps-ctr-") as folder:
            run(given.data, given.brokers, Path(folder), given.seed, print)
    except (HpsError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.ctr.stream",
        description="Serve a click model and stream its rows into the node while they are trained.",
    )
    parser.add_argument("--data", type=Path, required=True, help="Click_prediction_small.csv")
    parser.add_argument("--brokers", required=True, metavar="HOST:PORT", help="Kafka's")
    parser.add_argument("--seed", type=int, default=BASE.seed, help="of everything random")
    return parser


if __name__ == "__main__":
    sys.exit(main())
