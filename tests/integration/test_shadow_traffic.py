"""Shadow traffic at a real server: compared answers, a version that fails, and an overload."""

from __future__ import annotations

import re
import time
import urllib.request

import grpc
import pytest
import tritonclient.grpc as triton

from tests.integration.test_automatic_rollback import post, serving
from tests.integration.test_traffic import by_lookup
from tests.support.waiting import until

_SERIES = re.compile(
    r'^hps_shadow_(\w+)\{model="([\w.]+)",(?:result="(\w+)",)?version="\d+"\} (\S+)$', re.MULTILINE
)


def shadow(server):
    """By name, served name and result: the values of the shadow's metrics."""
    with urllib.request.urlopen(f"http://{server.hps.admin}/metrics") as reply:
        text = reply.read().decode()
    return {(m[1], m[2], m[3]): float(m[4]) for m in _SERIES.finditer(text)}


def compared(server, name="clicks"):
    return shadow(server).get(("requests_total", name, "compared"), 0)


@pytest.mark.parametrize(("version", "differs"), [(5, False), (4, True)])
def test_scores_are_compared(tmp_path, version, differs):
    with serving(tmp_path, 0) as (server, clients):
        post(server, "load", version=version, beside=True)
        post(server, "traffic", shadow={"version": version, "rate": 0.5})
        until(lambda: compared(server) >= 100)
        assert {*clients.versions} == {1}
        assert {*clients.statuses} == {200}
        found = shadow(server)
        assert found["rows_total", "clicks", None] >= 800  # four samples, two outputs
        share = found["differing_rows_total", "clicks", None] / found["rows_total", "clicks", None]
        assert share == pytest.approx(1.0 if differs else 0.0, abs=0.01)
        most = (
            found["max_difference_sum", "clicks", None]
            / found["max_difference_count", "clicks", None]
        )
        assert most == pytest.approx(1.5 if differs else 0.0, abs=1e-5)  # of the logits
        assert found["seconds_count", "clicks", None] >= 100
        assert found["requests_total", "clicks", "failed"] == 0


def test_a_failing_shadow_fails_no_request(tmp_path):
    with serving(tmp_path, 2) as (server, clients):
        post(server, "load", version=2, beside=True)
        clients.odd = True
        post(server, "traffic", shadow={"version": 2})
        until(lambda: shadow(server).get(("requests_total", "clicks", "failed"), 0) >= 20)
        assert {*clients.statuses} == {200}
        assert {*clients.versions} == {1}


def test_a_slow_shadow_is_dropped_and_delays_nothing(tmp_path):
    """The shadow takes twenty times as long: most mirrored requests are dropped, no live one waits."""
    with serving(tmp_path, 0) as (server, clients):
        clients.more(200)
        before = pace(clients)
        post(server, "load", version=3, beside=True)
        post(server, "traffic", shadow={"version": 3})
        clients.more(200)
        during = pace(clients)
        found = shadow(server)
        assert (
            found["requests_total", "clicks", "dropped"]
            > found["requests_total", "clicks", "compared"]
        )
        assert {*clients.statuses} == {200}
        # The shadow's network takes a core of the machine, but no live request waits for it.
        assert during > before / 5


def pace(clients, seconds=2.0):
    """Answered requests per second."""
    seen = len(clients.versions)
    time.sleep(seconds)
    return (len(clients.versions) - seen) / seconds


def test_lookups_of_all_protocols_are_compared(tmp_path):
    from tests.integration.test_model_versions import by_grpc, by_rest
    from tests.integration.test_model_versions import serving as serving_words

    with serving_words(tmp_path) as server:
        path = "/v2/repository/models/words/traffic"
        assert server.post(path, {"parameters": {"shadow": {"version": 2}}})[0] == 200
        with (
            triton.InferenceServerClient(server.grpc) as client,
            grpc.insecure_channel(server.grpc) as channel,
        ):
            for ask, rows in (
                (lambda: by_rest(server), 6),
                (lambda: by_grpc(client), 6),
                (lambda: by_lookup(channel), 2),
            ):
                before = shadow(server)
                assert ask() == 3
                key = "requests_total", "words.lookup", "compared"
                until(lambda key=key, before=before: shadow(server)[key] == before[key] + 1)
                after = shadow(server)
                for name in ("rows_total", "differing_rows_total"):
                    assert (
                        after[name, "words.lookup", None] - before[name, "words.lookup", None]
                        == rows
                    )
            assert by_lookup(channel, version=3) == 3  # of front ends, which name a version
            assert by_lookup(channel, version=2) == 2
        time.sleep(0.2)
        assert shadow(server) == after
