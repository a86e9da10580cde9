"""Log lines as text and as JSON, and the access log."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field

import numpy as np
import pytest

from hps.errors import BadRequest, Unsupported
from hps.tracing import RequestContext, traceparent_of
from services.frontend import log_settings, logs
from services.frontend.datatypes import INTEGERS, InputRule
from services.frontend.request_observer import RequestObserver
from services.server_state import ServerState

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def line(form, message, *args, error=None):
    exc_info = error and (type(error), error, None)
    record = logging.LogRecord("hps.x", logging.WARNING, "", 0, message, args, exc_info)
    return (logs.JsonLogFormatter if form == "json" else logs.TextLogFormatter)(
        logs.fields(worker=1)
    ).format(record)


def test_json_line_has_the_fields_of_the_text_line():
    args = logs.fields(model="m", keys=3, empty="", text='a "b"')
    text = line("text", "serving %s", args)
    assert text.endswith('WARNING hps.x serving model=m keys=3 text="a \\"b\\"" worker=1')
    logged = json.loads(line("json", "serving %s", args))
    assert logged.pop("ts").endswith("Z")
    assert logged == {
        "level": "warning",
        "logger": "hps.x",
        "msg": "serving",
        "model": "m",
        "keys": 3,
        "text": 'a "b"',
        "worker": 1,
    }
    logged = json.loads(line("json", "%s of %d\nfailed", "two", 3, error=ValueError("x\ny")))
    assert logged["msg"] == "two of 3\nfailed"
    assert logged["traceback"] == "ValueError: x\ny"
    assert json.loads(line("json", "nothing %s", logs.fields()))["msg"].rstrip() == "nothing"
    # A field of an event does not replace a field of the line with the same name.
    assert json.loads(line("json", "a %s", logs.fields(level="mine")))["level"] == "warning"


def test_terminal_control_characters_are_escaped():
    said = line("text", "table %s: größer… \\", "\x1b[2Jx\r\x9b\u2028y\n")
    assert said.endswith("table \\x1b[2Jx\\r\\x9b\\u2028y\\n: größer… \\\\ worker=1")


@pytest.fixture
def levels():
    held = {name: logging.getLogger(name).level for name in (None, "uvicorn")}
    yield
    for name, level in held.items():
        logging.getLogger(name).setLevel(level)


def test_log_level_changes_while_the_server_runs(levels):
    state, spread = ServerState("node"), []
    state.propagate_log_level = spread.append
    logs.set_level("info")
    assert log_settings.log_settings()["log_verbose_level"] == 0
    now = log_settings.change_log_settings({"log_verbose_level": 1}, state)
    assert logs.level() == "debug"
    assert now["log_info"] is True
    assert now["log_verbose_level"] == 1
    log_settings.change_log_settings({"log_verbose_level": 0, "log_info": False}, state)
    assert logs.level() == "warning"
    now = log_settings.change_log_settings({"log_warning": False}, state)
    assert (now["log_info"], now["log_warning"], now["log_error"]) == (False, False, True)
    assert spread == ["debug", "warning", "error"]
    for wrong, kind in {
        ("log_error", False): BadRequest,
        ("log_info", 1): BadRequest,
        ("log_verbose_level", -1): BadRequest,
        ("log_x", True): BadRequest,
        ("log_file", "/etc/x"): Unsupported,
    }.items():
        with pytest.raises(kind):
            log_settings.change_log_settings(dict([wrong]), state)
    state.propagate_log_level = None
    with pytest.raises(Unsupported, match="use the admin port"):
        log_settings.change_log_settings({"log_info": True}, state)


@dataclass
class Endpoint:
    name: str = "m.lookup"
    version: str = "3"
    rules: dict = field(
        default_factory=lambda: {
            "f": InputRule(INTEGERS, is_keys=True),
            "dense": InputRule({"FP32": np.dtype("f4")}, is_keys=False),
        }
    )


def log_answered(observer, origin):
    inputs = {"f": np.arange(5), "dense": np.ones(7)}
    observer.log_answered("grpc", origin, Endpoint(), inputs, 2, (0, 10, 20, 5_000_000))


def test_share_of_the_requests_is_logged(caplog, monkeypatch):
    monkeypatch.setattr("random.random", iter([0.4, 0.6, 0.4, 0.6]).__next__)
    caplog.set_level("INFO", "hps.access")
    observer = RequestObserver(0.5)
    assert observer.watches
    for origin in (RequestContext("r-1", TRACE), RequestContext("r-2")):
        log_answered(observer, origin)
    for origin in (RequestContext("r-3"), RequestContext("r-4")):
        observer.failed("http", origin, None, 503, RuntimeError("busy"), 0)
    first, second = caplog.records
    assert first.args == {
        "request_id": "r-1",
        "trace_id": TRACE[3:35],
        "span_id": TRACE[36:52],
        "protocol": "grpc",
        "model": "m.lookup",
        "model_version": "3",
        "status": "OK",
        "dur_ms": 5.0,
        "keys": 5,
        "misses": 2,
    }
    assert second.args["request_id"] == "r-3"
    assert second.args["error"] == "busy"


def test_requests_are_not_logged_by_default(caplog):
    caplog.set_level("INFO", "hps.access")
    observer = RequestObserver()
    assert not observer.watches
    log_answered(observer, observer.begin("m", 0, "r-1", RequestContext("r-1")))
    assert not caplog.records
    assert observer.begin("m", 0, "", RequestContext()).request_id == ""
    with caplog.at_level("DEBUG", "hps.access"):
        # A logged request needs an id.
        assert len(observer.begin("m", 0, "", RequestContext()).request_id) == 16
        log_answered(observer, RequestContext("r-1"))
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("header", "is_one"),
    [
        (TRACE, True),
        (TRACE.upper(), False),
        (TRACE + "-x", False),
        ("01" + TRACE[2:] + "-x", True),
        ("ff" + TRACE[2:], False),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", False),
        ("00-1-2-00", False),
        ("", False),
    ],
)
def test_valid_traceparent_is_continued(header, is_one):
    assert traceparent_of(header) == (header[:55] if is_one else "")
