"""What a server process tells of itself."""

from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from services.process_numbers import publish_process, resident_bytes

STATUS = """Name:\tpython
VmRSS:\t  100 kB
RssAnon:\t   60 kB
RssFile:\t   30 kB
RssShmem:\t   10 kB
"""


def test_kinds_of_resident_memory():
    told = {"anonymous": 60 << 10, "file": 30 << 10, "shared": 10 << 10}
    assert dict(resident_bytes(STATUS)) == told


def test_a_process_is_told_of():
    metrics = Metrics()
    publish_process(metrics, "lookup")
    numbers = metrics.numbers()
    assert numbers[m.PROCESS_CPU][("lookup",)] > 0
    assert numbers[m.PROCESS_MEMORY]["lookup", "anonymous"] > 1 << 20
