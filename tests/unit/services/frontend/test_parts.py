"""Error table, log lines, statistics, progress, sockets."""

from __future__ import annotations

import logging
import socket

import orjson
import pytest

import hps.errors
from hps.errors import (
    ConfigError,
    HpsError,
    ModelError,
    NotFound,
    TierError,
    TierTimeout,
    Unavailable,
)
from hps.types import NoProgress
from services.frontend import logs
from services.frontend.background_open import LoadProgress
from services.frontend.errors import RequestTooLarge, http_status
from services.frontend.http.errors import error_body
from services.frontend.listening import listen
from services.frontend.statistics import MAX_BATCH_SIZES, Statistics


def test_every_error_has_a_status():
    kinds = [
        k for k in vars(hps.errors).values() if isinstance(k, type) and issubclass(k, HpsError)
    ]
    assert len(kinds) > 10
    for kind in kinds:
        error = kind("tier", "text") if issubclass(kind, TierError) else kind("text")
        assert 400 <= http_status(error) < 600
    assert http_status(NotFound("")) == 404
    assert http_status(TierTimeout("redis", "")) == 504
    assert http_status(RequestTooLarge("")) == 413
    assert http_status(ConfigError("")) == http_status(ModelError("")) == 409
    assert http_status(HpsError("")) == 500

    class Later(Unavailable):
        pass

    assert http_status(Later("")) == 503


def test_error_bodies_are_valid_json_for_any_message():
    for message in ("", 'a "quoted" \n text', "é", "\ud800"):
        assert list(orjson.loads(error_body(message))) == ["error"]


def test_log_fields_are_plain_or_quoted():
    line = logs.fields(id="a-1", empty="", n=3, text='two words "x"\nend', accent="é")
    assert str(line) == 'id=a-1 n=3 text="two words \\"x\\"\\nend" accent="\\xe9"'


def test_traceback_is_one_line():
    try:
        raise ValueError("broken\nin two")
    except ValueError as error:
        record = logging.LogRecord(
            "hps.frontend",
            logging.ERROR,
            "",
            0,
            "it %s\nfailed",
            ("all",),
            (type(error), error, None),
        )
    line = logs.TextLogFormatter().format(record)
    assert "\n" not in line
    assert line.split(" ", 3)[1:3] == ["ERROR", "hps.frontend"]
    assert "it all\\nfailed" in line
    assert 'traceback="ValueError: broken\\nin two"' in line


COMPUTE = ("compute_input", "compute_infer", "compute_output")


def test_statistics_list_a_bounded_number_of_batch_sizes():
    stats = Statistics()
    for batch in range(MAX_BATCH_SIZES + 10):
        stats.succeeded(batch, (10, 20, 40, 80))
    found = stats.as_json("m", "1")
    assert len(found["batch_stats"]) == MAX_BATCH_SIZES
    assert found["execution_count"] == MAX_BATCH_SIZES + 10
    assert found["inference_count"] == sum(range(MAX_BATCH_SIZES + 10))
    assert found["batch_stats"][3] == {
        "batch_size": 3,
        "compute_input": {"count": 1, "ns": 10},
        "compute_infer": {"count": 1, "ns": 20},
        "compute_output": {"count": 1, "ns": 40},
    }
    assert Statistics().as_json("m", "1")["last_inference"] == 0


def test_statistics_separate_queue_time():
    stats = Statistics()
    stats.succeeded(2, (10, 20, 140, 150), queued=70)
    stats.failed(10, 30)
    found = stats.as_json("m", "1")["inference_stats"]
    split = {name: found[name]["ns"] for name in ("queue", *COMPUTE)}
    assert split == dict(zip(("queue", *COMPUTE), (70, 10, 50, 10), strict=True))
    assert sum(split.values()) == found["success"]["ns"] == 140
    assert found["fail"] == {"count": 1, "ns": 20}
    total = Statistics()
    total.add(stats.numbers())
    assert total.as_json("m", "1") == stats.as_json("m", "1")


def test_statistics_count_a_batch_as_one_execution():
    stats = Statistics()
    one, other = iter((5,)), iter((0,))
    stats.succeeded(2, (10, 20, 140, 150), queued=70, execution=one)
    stats.succeeded(3, (10, 20, 240, 250), execution=one)
    stats.succeeded(5, (10, 20, 40, 80))
    stats.succeeded(0, (10, 20, 40, 80), execution=other)
    stats.succeeded(0, (10, 20, 40, 80), execution=other)
    found = stats.as_json("m", "1")
    assert (found["inference_count"], found["execution_count"]) == (10, 3)
    reported = [
        (each["batch_size"], each["compute_infer"]["count"], each["compute_infer"]["ns"])
        for each in found["batch_stats"]
    ]
    assert reported == [(0, 1, 20), (5, 2, 50 + 20)]
    # The times of all requests are in the totals.
    assert found["inference_stats"]["compute_infer"] == {"count": 5, "ns": 50 + 220 + 3 * 20}
    total = Statistics()
    for _ in range(2):
        total.add(stats.numbers())
    twice = total.as_json("m", "1")
    assert (twice["inference_count"], twice["execution_count"]) == (20, 6)
    assert [each["compute_infer"]["count"] for each in twice["batch_stats"]] == [2, 4]


def test_progress_is_reported_and_loading_can_be_cancelled():
    tasks = []
    progress = LoadProgress(tasks, NoProgress())
    with progress.task("rows", 10) as step:
        step(4)
        assert tasks == [{"title": "rows", "done": 4, "total": 10, "unit": "rows"}]
        progress.cancel()
        with pytest.raises(Unavailable, match="shutting down"):
            step(1)
    assert tasks == []
    with pytest.raises(Unavailable), progress.task("more", 1):
        pass


def test_taken_port_is_a_configuration_error():
    with listen("127.0.0.1", 0, "server.http") as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            listen("127.0.0.1", port, "server.http")
    assert f"server.http: cannot listen on 127.0.0.1:{port}: Address already in use" in str(
        caught.value
    )
    assert "set server.http.port (0 takes a free one)" in str(caught.value)


def test_invalid_address_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"server.admin.host is 'no such host.invalid'"):
        listen("no such host.invalid", 0, "server.admin")
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        listen("192.0.2.1", 0, "server.admin")


def test_ipv6_address_is_in_brackets_in_urls():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        with pytest.raises(ConfigError, match="cannot listen on ::1:0"):
            listen("::1", 0, "server.http")
    else:
        with listen("::1", 0, "server.http") as sock:
            assert sock.family == socket.AF_INET6
