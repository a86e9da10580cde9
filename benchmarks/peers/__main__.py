"""``python -m benchmarks.peers [NAME…]``: set up the peers' environments under ``.peers/``."""

from __future__ import annotations

import sys

from benchmarks.peers.environments import ENVIRONMENTS, PeerMissing


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in ENVIRONMENTS]
    if unknown:
        print(f"unknown peers {unknown}; known: {sorted(ENVIRONMENTS)}", file=sys.stderr)
        return 2
    failed = 0
    for name in names or ENVIRONMENTS:
        try:
            ENVIRONMENTS[name].build()
        except PeerMissing as missing:
            print(f"{name}: {missing}", file=sys.stderr)
            failed = 1
        else:
            print(f"{name}: ready")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
