"""Exit of a process whose daemon threads are in the compiled core."""

import subprocess
import sys

import pytest

from hps import native

_PROGRAM = """
import threading
import time
import numpy as np
from hps.native import CacheTable, gather_all

keys = np.arange(50_000)
table = CacheTable(60_000, np.empty((0, 64), np.float32), "lru", 1)
table.write(keys, np.ones((len(keys), 64), np.float32), np.ones(len(keys), np.uint64), 0, False)
running = threading.Barrier(4)

class SlowEnd:
    # Deleted while the interpreter shuts down; every thread tries to take the GIL back meanwhile.
    def __del__(self, sleep=time.sleep):
        sleep(0.2)

end = SlowEnd()

def read():
    out = np.empty((len(keys), 64), np.float32)
    running.wait()
    while True:
        gather_all({1: table}, [(1, keys, out)])

for _ in range(3):
    threading.Thread(target=read, daemon=True).start()
running.wait()
time.sleep(0.1)
"""


@pytest.mark.skipif(not native.COMPILED, reason="tests the compiled core")
def test_process_exits_cleanly_while_daemon_threads_gather():
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, timeout=120)
    assert done.stderr == b""
    assert done.returncode == 0
