"""Attached processes: the versions that they open and serve, and those that the node may free."""

import threading

import pytest

from hps.errors import Unavailable, Unsupported
from hps.tiers.node import AttachedProcesses
from hps.tiers.node import attached_processes as followers
from tests.support.waiting import until


class Process:
    """An attached process that opens and serves versions step by step."""

    def __init__(self, node, number=1):
        self._node, self.number = node, number
        self.holds, self.serves, self.failed, self.revision = [], [], {}, 0
        self.orders = self.report()

    def report(self, leaves=False):
        self.orders = self._node.report(
            self,
            {
                "process": self.number,
                "holds": self.holds,
                "serves": self.serves,
                "failed": self.failed,
                "revision": self.revision,
                "leaves": leaves,
            },
        )
        return self.orders

    def follow_orders(self):
        """Open and serve the versions of the orders, close the others, and report."""
        serve, opened = ([token for _, _, token in self.orders[what]] for what in ("serve", "open"))
        self.serves, self.holds = serve, [*serve, *opened]
        self.revision = self.orders["revision"]
        return self.report()

    def end(self):
        self._node.disconnected(self)


@pytest.fixture
def node():
    return AttachedProcesses([("words", 1), ("clicks", 1)])


def started(node, version=2, model="words", check=lambda: None):
    """Start a load that waits for the processes; return its result."""
    ended = []

    def load():
        try:
            node.open(model, version, check)
        except Exception as error:
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=load)
    thread.start()
    until(lambda: node._next is not None)
    return thread, ended


def test_all_processes_open_version_before_any_serves_it(node):
    first, second = Process(node), Process(node, 2)
    first.follow_orders()
    second.follow_orders()
    thread, ended = started(node)
    first.report()
    assert [each[:2] for each in first.orders["open"]] == [("words", 2)]
    assert ("words", 1) in [each[:2] for each in first.orders["serve"]]
    first.follow_orders()
    late = Process(node, 3)  # it must have the version too
    second.report()
    second.follow_orders()
    assert not ended
    late.follow_orders()
    thread.join()
    assert ended == [None]
    (replaced,) = node.serve([("words", 2), ("clicks", 1)], {})
    assert (replaced.model, replaced.version) == ("words", 1)
    assert not first.report()["open"]
    assert [each[:2] for each in first.orders["serve"]] == [("words", 2), ("clicks", 1)]


def test_version_that_a_process_may_use_is_kept(node):
    process = Process(node)  # it has the order, and may be opening the version now
    thread, _ = started(node)
    process.follow_orders()
    process.follow_orders()
    thread.join()
    (replaced,) = node.serve([("words", 2), ("clicks", 1)], {})
    other = node._served["words", 2]
    assert node.uses(replaced)
    process.report()  # of the other version; a request is on the former one still
    process.serves = [token for _, _, token in process.orders["serve"]]
    process.report()
    assert node.uses(replaced)
    process.follow_orders()
    assert not node.uses(replaced)
    process.end()
    assert not node.uses(other)


def test_reloaded_version_gets_new_token(node):
    process = Process(node)
    process.follow_orders()
    first = node._served["words", 1]
    for version in (2, 1):
        thread, _ = started(node, version)
        process.report()
        process.follow_orders()
        thread.join()
        node.serve([("words", version), ("clicks", 1)], {})
    process.holds.append(first.token)  # a request has been on it all the while
    process.report()
    assert node.uses(first)
    assert node._served["words", 1].token != first.token


@pytest.mark.parametrize(("rejected", "raised"), [(False, Unavailable), (True, Unsupported)])
def test_process_that_cannot_open_version_fails_load(node, rejected, raised):
    process = Process(node, 77)
    process.follow_orders()
    thread, ended = started(node)
    ((_, _, token),) = process.report()["open"]
    process.failed = {token: (rejected, "no memory")}
    process.report()
    thread.join()
    assert type(ended[0]) is raised
    assert "attached process 77 failed to open version 2" in str(ended[0])
    node.withdraw()
    assert not process.report()["open"]
    assert process.orders["serve"][0][:2] == ("words", 1)


def test_load_waits_for_replacement_of_killed_process(node):
    killed = Process(node)
    thread, ended = started(node)
    killed.end()
    successor = Process(node, 2)
    assert not ended
    successor.follow_orders()
    thread.join()
    assert ended == [None]


def test_load_completes_without_successor_of_killed_process(node, monkeypatch):
    monkeypatch.setattr(followers, "_REPLACED_S", 0.0)
    killed = Process(node)
    thread, ended = started(node)
    killed.end()
    thread.join()
    assert ended == [None]


def test_load_fails_when_version_kills_processes_but_not_when_they_leave(node):
    stays, leaves, dies = Process(node), Process(node, 2), Process(node, 3)
    thread, ended = started(node)
    leaves.report(leaves=True)
    leaves.end()
    stays.report()
    stays.follow_orders()
    stays.end()  # it had opened it
    dies.end()
    Process(node, 4).end()
    thread.join()
    assert isinstance(ended[0], Unavailable)
    assert "attached processes 3 and 4 ended before" in str(ended[0])


def test_hanging_process_fails_load(node, monkeypatch):
    monkeypatch.setattr(followers, "_OPEN_S", 0.0)
    Process(node, 5)
    with pytest.raises(Unavailable, match=r"process 5.*has not opened version 2 of model 'words'"):
        node.open("words", 2, lambda: None)


def test_closing_node_ends_wait(node):
    Process(node)

    def check():
        raise Unavailable("is being closed")

    with pytest.raises(Unavailable, match="being closed"):
        node.open("words", 2, check)
    with pytest.raises(Unavailable, match="being closed"):
        node.settle(check)


def test_settle_waits_for_switch_with_limit(node, monkeypatch, caplog):
    process, starting = Process(node, 9), Process(node)
    process.follow_orders()
    (replaced,) = node.serve([("words", 1)], {})
    settled = threading.Thread(target=node.settle, args=(lambda: None,))
    settled.start()
    process.report()
    assert settled.is_alive()
    process.follow_orders()
    settled.join()
    assert node.uses(replaced)  # by the one that has not even begun
    starting.end()
    assert not node.uses(replaced)
    monkeypatch.setattr(followers, "_SERVE_S", 0.0)
    node.serve([], {})
    node.settle(lambda: None)
    assert "attached processes still serve their previous versions: 9" in caplog.text
