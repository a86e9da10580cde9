"""``python -m benchmarks.peers [NAME…]``: set up the peers' environments under ``.peers/``."""

from __future__ import annotations

import sys

from benchmarks.peers.environments import ENVIRONMENTS, PeerMissing
from benchmarks.peers.kafka_broker import KAFKA


def main(names: list[str]) -> int:
    parts = {**ENVIRONMENTS, KAFKA.name: KAFKA}
    unknown = [name for name in names if name not in parts]
    if unknown:
        print(f"unknown peers {unknown}; known: {sorted(parts)}", file=sys.stderr)
        return 2
    failed = 0
    for name in names or parts:
        try:
            parts[name].build()
        except PeerMissing as missing:
            print(f"{name}: {missing}", file=sys.stderr)
            failed = 1
        else:
            print(f"{name}: ready")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
