"""Train the click model on the KDD Cup 2012 sample and publish it.

    python -m examples.ctr.train --data Click_prediction_small.csv --out models

See examples/README.md for the data, the options and what the figures mean.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax

from examples.ctr.baseline import hashed_regression_auc
from examples.ctr.data import read_csv, split
from examples.ctr.export import MODEL, publish, write_requests
from examples.ctr.training import DEFAULTS, Trained, auc, train
from hps.errors import HpsError


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    started = time.monotonic()
    if given.out is not None and not given.replace:
        folder = given.out / MODEL / str(given.version)
        if folder.exists():
            print(f"{folder} exists; give another --version, or --replace it", file=sys.stderr)
            return 1
    try:
        samples = read_csv(given.data)
    except (OSError, ValueError) as error:
        print(f"{given.data}: {error}", file=sys.stderr)
        return 2
    parts = split(len(samples))
    print(f"{len(samples):,} impressions, {samples.clicked.mean():.1%} clicked")
    if given.baseline:
        print(f"hashed logistic regression: test AUC {hashed_regression_auc(samples, parts):.4f}")
    options = replace(DEFAULTS, seed=given.seed, epochs=given.epochs)
    trained = train(samples, parts, options, print)
    test = samples.take(parts.test)
    test_auc = auc(test.clicked, trained.score(test)["logit"])
    print(f"test AUC {test_auc:.4f} (epoch {trained.epoch}, {time.monotonic() - started:.0f} s)")
    return 0 if given.out is None else _publish(trained, test_auc, given)


def _publish(trained: Trained, test_auc: float, given: argparse.Namespace) -> int:
    metadata = {
        "trainer": "examples/ctr",
        "data": "KDD Cup 2012 track 2, sample of OpenML 1220",
        "seed": trained.options.seed,
        "epoch": trained.epoch,
        "valid_auc": round(trained.valid_auc, 6),
        "test_auc": round(test_auc, 6),
        "jax": jax.__version__,
    }
    try:
        folder = publish(trained, given.out, given.version, metadata, replace=given.replace)
    except HpsError as error:
        print(error, file=sys.stderr)
        return 1
    requests = write_requests(trained, given.out)
    print(f"published {folder}; requests to try it with: {requests}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.ctr.train",
        description="Train the click model on the KDD Cup 2012 sample and publish it.",
    )
    parser.add_argument("--data", type=Path, required=True, help="Click_prediction_small.csv")
    parser.add_argument("--out", type=Path, help="model repository; without it nothing is written")
    parser.add_argument("--version", type=int, default=1, help="version to publish (default 1)")
    parser.add_argument("--replace", action="store_true", help="replace that version")
    parser.add_argument("--seed", type=int, default=DEFAULTS.seed, help="of everything random")
    parser.add_argument("--epochs", type=int, default=DEFAULTS.epochs)
    parser.add_argument(
        "--baseline", action="store_true", help="also train the yardstick, a logistic regression"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
