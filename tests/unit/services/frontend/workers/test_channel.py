"""Control channel between the node's process and a worker."""

from __future__ import annotations

import socket
import threading

import pytest

from hps.tiers.node import frames
from services.frontend.workers.channel import ControlChannelSupervisor, ControlChannelWorker


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ControlChannelSupervisor(ours), theirs


def test_queries_are_answered_until_one_side_ends(ends):
    asking, theirs = ends
    alone = threading.Event()
    answering = ControlChannelWorker(theirs, alone.set)
    asking.send_first(b"settings")
    assert answering.receive() == b"settings"
    given = []
    answering.start({"numbers": lambda: {"a": [1, 2]}, "take": given.append})
    answering.send_first("ready")
    assert asking.receive_first() == "ready"
    asking.notify("take", [3, 4])
    assert asking.query("numbers", 60) == {"a": [1, 2]}
    assert given == [[3, 4]]
    assert not alone.is_set()
    asking.close()
    assert alone.wait(60)


def test_late_answer_is_not_taken_for_the_next_one(ends):
    asking, theirs = ends
    go = threading.Event()
    ControlChannelWorker(theirs, lambda: None).start(
        {"slow": lambda: go.wait(60), "quick": lambda: "here"}
    )
    with pytest.raises(TimeoutError):
        asking.query("slow", 0.05)
    go.set()
    assert asking.query("quick", 60) == "here"


def test_query_to_an_ended_worker_raises(ends):
    asking, theirs = ends
    theirs.close()
    with pytest.raises(OSError, match=r"pipe|closed"):
        asking.query("ready", 60)


def test_worker_that_fails_to_answer_closes_the_channel(ends, caplog):
    asking, theirs = ends
    alone = threading.Event()
    ControlChannelWorker(theirs, alone.set).start({"broken": lambda: 1 // 0})
    with pytest.raises(TimeoutError):
        asking.query("broken", 0.05)
    assert alone.wait(60)
    assert "ZeroDivisionError" in caplog.text


def test_invalid_frame_closes_the_channel_for_both():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        alone = threading.Event()
        ControlChannelWorker(theirs, alone.set).start({})
        frames.send(ours, frames.FrameKind.ASK, [b"{,}"])
        assert alone.wait(60)
        frames.send(theirs, frames.FrameKind.OK, [b"{,}"])
        with pytest.raises(OSError, match="invalid JSON"):
            ControlChannelSupervisor(ours).receive_first()
        theirs.settimeout(60)
        assert theirs.recv(1) == b""  # the other end notices that the channel has closed


def test_message_to_an_ended_process_is_dropped(ends):
    asking, theirs = ends
    asking.close()
    ControlChannelWorker(theirs, lambda: None).send_first("ready")
