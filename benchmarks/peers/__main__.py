"""``python -m benchmarks.peers [NAME…]``: set up the peers' environments under ``.peers/``."""

from __future__ import annotations

import sys

from benchmarks.peers.environments import ENVIRONMENTS, PeerMissing
from benchmarks.peers.go_tools import GO_TOOLS
from benchmarks.peers.kafka_broker import KAFKA


def main(names: list[str]) -> int:
    parts = {**ENVIRONMENTS, KAFKA.name: KAFKA, **GO_TOOLS}
    unknown = [name for name in names if name not in parts]
    if unknown:
        print(f"unknown peers {unknown}; known: {sorted(parts)}", file=sys.stderr)
        return 2
    failed = 0
    # Programs that only some tests want take minutes to compile: by name.
    for name in names or [each for each in parts if each not in GO_TOOLS]:
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
