"""``python -m benchmarks.peers [NAME…]``: set up the peers' environments under ``.peers/``."""

from __future__ import annotations

import sys

from benchmarks.peers.environments import ENVIRONMENTS, PeerMissing
from benchmarks.peers.go_tools import GO_TOOLS
from benchmarks.peers.kafka_broker import KAFKA
from benchmarks.peers.kube_crds import KUBE_CRDS


def main(names: list[str]) -> int:
    go_made = {**GO_TOOLS, KUBE_CRDS.name: KUBE_CRDS}
    parts = {**ENVIRONMENTS, KAFKA.name: KAFKA, **go_made}
    unknown = [name for name in names if name not in parts]
    if unknown:
        print(f"unknown peers {unknown}; known: {sorted(parts)}", file=sys.stderr)
        return 2
    failed = 0
    # Go programs, which only the chart's tests use, take minutes to compile: only by name.
    for name in names or [each for each in parts if each not in go_made]:
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
