"""Metrics of a server process."""

from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from services.process_numbers import publish_process, resident_bytes

STATUS = """Name:\tpython
VmRSS:\t  100 kB
RssAnon:\t   60 kB
RssFile:\t   30 kB
RssShmem:\t   10 kB
"""


def test_resident_memory_by_kind():
    told = {"anonymous": 60 << 10, "file": 30 << 10, "shared": 10 << 10}
    assert dict(resident_bytes(STATUS)) == told


def test_process_exports_cpu_time_and_memory():
    metrics = Metrics()
    publish_process(metrics, "lookup")
    numbers = metrics.numbers()
    assert numbers[m.PROCESS_CPU][("lookup",)] > 0
    assert numbers[m.PROCESS_MEMORY]["lookup", "anonymous"] > 1 << 20
