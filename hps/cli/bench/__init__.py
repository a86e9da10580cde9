"""``hps bench``: a load generator, and what two of its runs differ in."""

from hps.cli.bench.command import app

__all__ = ["app"]
