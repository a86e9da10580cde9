"""`RemoteLookup` over real ports: answers equal to the engine's, and failures of nodes."""

import contextlib
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import fields, replace

import grpc
import numpy as np
import pytest

from hps.config.server_settings import TlsSettings
from hps.errors import BadRequest, DeadlineExceeded, HpsError, ModelError, Unavailable
from hps.lookup.base import LookupModel
from hps.lookup.remote import (
    Candidates,
    ClientTls,
    NodeRegistry,
    RemoteLookup,
    RemoteLookupLimits,
    RetryBudget,
)
from hps.lookup.remote import (
    unary_method as unary,
)
from hps.lookup.remote.balancing import LeastBusy
from hps.lookup.remote.model_description import describe_model
from hps.types import EmbeddingTable, JaggedKeys, LookupRequest, Source
from hps.v1 import lookup_pb2 as pb
from tests.support import redis_servers
from tests.support.waiting import until
from tests.unit.services import conftest as support
from tests.unit.services.conftest import row, serve_models
from tests.unit.services.frontend.grpc.conftest import running

INT64 = np.int64


def model_of(served):
    return LookupModel(
        served.name,
        served.version,
        served.tables,
        served.engine.features,
        served.spec.max_batch_size,
    )


@pytest.fixture
def connect(small):
    """``connect(*urls, model="ctr", **options)``: a lookup at those ports."""
    closing = []

    def connect(*urls, model="ctr", described=None, api_key=None, **options):
        limits = {
            field.name: options.pop(field.name)
            for field in fields(RemoteLookupLimits)
            if field.name in options
        }
        nodes = NodeRegistry(urls, None, api_key)
        closing.append(nodes)
        candidates = Candidates(described or model_of(small.node.models[model]), nodes)
        closing.append(candidates)
        return RemoteLookup(candidates, limits=RemoteLookupLimits(**limits), **options)

    yield connect
    for each in reversed(closing):
        each.close()


@pytest.fixture
def remote(serve, connect):
    return connect(serve().server.url)


def problems(remote):
    return remote._candidates.problems


def nodes_of(remote):
    return remote._candidates.nodes.all


def left(*keys):
    return LookupRequest({"left": JaggedKeys(np.array(keys, INT64), len(keys))})


def same(one, other):
    assert list(one.vectors) == list(other.vectors)
    for name, vectors in one.vectors.items():
        assert vectors.dtype == other.vectors[name].dtype
        assert vectors.tobytes() == other.vectors[name].tobytes()
        assert vectors.shape == other.vectors[name].shape
    for name, sources in one.sources.items():
        assert sources.tolist() == other.sources[name].tolist()
        assert one.versions[name].tolist() == other.versions[name].tolist()
    assert (one.defaulted, one.degraded) == (other.defaulted, other.degraded)


def requests():
    rng = np.random.default_rng(3)

    def keys(n):
        return rng.integers(-2, 22, n)

    offsets = np.array([0, 2, 2, 7])
    yield {"user": JaggedKeys(keys(3), 3)}
    yield {
        "item": JaggedKeys(keys(3), 3),
        "user": JaggedKeys(keys(1), 1),
        "history": JaggedKeys(keys(7), 3, offsets),
    }
    weights = rng.random(7, np.float32)
    yield {"history": JaggedKeys(keys(7), 3, offsets.astype(np.int32), weights)}
    yield {"history": JaggedKeys(keys(0), 0)}
    yield {"history": JaggedKeys(keys(12).astype(np.uint64), 4)}


@pytest.mark.parametrize("report", [False, True])
@pytest.mark.parametrize("features", list(requests()))
def test_answers_equal_those_of_the_engine(remote, small, features, report):
    small.memory.insert = lambda *_args: None  # sources are unchanged
    request = LookupRequest(features, want_source=report)
    same(remote.lookup(request), small.node.models["ctr"].engine.lookup(request))


@pytest.mark.parametrize("known", [True, False])
def test_calls_with_and_without_grpc_futures(serve, connect, small, known, monkeypatch):
    assert unary.KNOWN, "gRPC is another inside: see hps/lookup/remote/unary_method.py"
    monkeypatch.setattr(unary, "KNOWN", known)
    remote = connect(serve().server.url, model="words")
    (target,) = nodes_of(remote)
    for key in range(3):
        assert remote.lookup(left(key)).vectors["left"].tolist() == [row(key, 3)]
    small.store.gate.clear()
    with pytest.raises(DeadlineExceeded):
        remote.lookup(replace(left(15), deadline=time.monotonic() + 1))
    pending = remote.submit(replace(left(16), deadline=time.monotonic() + 60))
    assert pending.cancel()
    until(lambda: not target.in_flight)
    assert dict(target.answers) == {"OK": 3, "DEADLINE_EXCEEDED": 1, "CANCELLED": 1}
    remote._candidates.nodes.close()
    with pytest.raises(Unavailable, match="its connection has been closed"):
        remote.lookup(left(1))


def test_tables_and_half_precision(serve, connect, small):
    remote = connect(serve().server.url, model="halves")
    keys = JaggedKeys(np.array([1, 99, 12]), 3)
    request = LookupRequest({"half": keys}, want_source=True, by_table=True)
    found = remote.lookup(request)
    same(found, small.node.models["halves"].engine.lookup(request))
    assert found.sources["half"].tolist()[1] == Source.DEFAULT
    assert found.defaulted == 1


def test_vectors_are_written_into_the_callers_arrays(remote):
    out = np.zeros((2, 2), np.float32)
    request = LookupRequest({"item": JaggedKeys(np.array([1, 2]), 2)}, out={"item": out})
    found = remote.lookup(request)
    assert found.vectors["item"] is out
    assert out.tolist() == [row(1, 2), row(2, 2)]


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int8, np.uint64])
def test_prepared_lookup_is_called_with_other_keys(remote, dtype):
    """Keys may have any integer type."""
    submit = remote.prepare(LookupRequest({"item": JaggedKeys(np.array([1, 2]), 2)}))
    for keys in ([3, 4], [5, -1], [4, 3]):
        found = submit([np.array(keys).astype(dtype)], None).result()
        wanted = [row(key, 2) if key > 0 else [0.5, 0.5] for key in keys]
        assert found.vectors["item"].tolist() == wanted
        assert found.defaulted == keys.count(-1)


@pytest.mark.parametrize(
    ("features", "text"),
    [
        ({}, "names no feature"),
        ({"itme": [1]}, "has no feature 'itme'; did you mean 'item'"),
        ({"item": [1.5]}, "must be integers"),
        ({"item": [1], "user": [1, 2]}, "batch sizes differ"),
    ],
)
def test_invalid_requests_are_not_sent(remote, features, text):
    given = {name: JaggedKeys(np.array(keys), len(keys)) for name, keys in features.items()}
    with pytest.raises(BadRequest, match=text):
        remote.submit(LookupRequest(given))


def test_degraded_tiers_are_reported(remote, small):
    def broken(parts, ctx):
        ctx.degraded.append("rocksdb")

    small.store.fetch = broken
    found = remote.lookup(LookupRequest({"item": JaggedKeys(np.array([15]), 1)}))
    assert found.degraded == ("rocksdb",)
    assert found.vectors["item"].tolist() == [[0.5, 0.5]]


def test_lookups_spread_over_nodes_and_survive_the_loss_of_one(small, connect):
    with running(small) as one, running(small) as two:
        remote = connect(one.server.url, two.server.url, model="words")
        counted = small.state.entries["words.lookup"].statistics
        for key in range(10):
            assert remote.lookup(left(key)).vectors["left"].tolist() == [row(key, 3)]
        one.stop(force=True)
        one.join()
        for key in range(10):
            assert remote.lookup(left(key)).vectors["left"].tolist() == [row(key, 3)]
        assert counted.success_count == 20
    with pytest.raises(Unavailable, match="no lookup node answered; last failure"):
        remote.lookup(left(1))


def test_recovered_node_gets_lookups_again(small, connect):
    with running(small) as first:
        url = first.server.url
        remote = connect(url, model="words")
        remote.lookup(left(1))
    with pytest.raises(Unavailable):
        remote.lookup(left(1))

    def answers():
        try:
            return remote.lookup(left(1))
        except Unavailable:
            return None

    with running(small, grpc={"port": int(url.rsplit(":", 1)[1])}):
        until(answers)


def test_node_unreachable_at_the_start_is_used_once_it_answers(small, connect):
    with running(small) as once:
        url = once.server.url
    remote = connect(url, model="words")
    assert list(problems(remote)) == [url]
    with pytest.raises(
        Unavailable, match=r"no lookup node serves model 'words' version 1: .*UNAVAIL"
    ):
        remote.lookup(left(1))
    with running(small, grpc={"port": int(url.rsplit(":", 1)[1])}):
        until(lambda: not problems(remote))
        assert remote.lookup(left(1)).defaulted == 0


def test_deadline_is_passed_to_the_node(remote, small):
    small.store.gate.clear()
    request = LookupRequest({"item": JaggedKeys(np.array([15]), 1)}, time.monotonic() + 0.05)
    with pytest.raises(DeadlineExceeded):
        remote.lookup(request)
    with pytest.raises(DeadlineExceeded, match="deadline exceeded before the lookup started"):
        remote.submit(replace(request, deadline=time.monotonic() - 1))


def test_request_without_deadline_gets_the_default(serve, connect, small):
    remote = connect(serve().server.url, timeout_s=0.05)
    small.store.gate.clear()
    with pytest.raises(DeadlineExceeded):
        remote.lookup(LookupRequest({"item": JaggedKeys(np.array([15]), 1)}))


def test_lookups_beyond_the_limit_are_rejected(serve, connect, small):
    remote = connect(serve().server.url, in_flight=2)
    small.store.gate.clear()
    request = LookupRequest({"item": JaggedKeys(np.array([15]), 1)})
    waiting = [remote.submit(request) for _ in range(2)]
    with pytest.raises(Unavailable, match=r"2 lookups are already in flight .*lookup\.in_flight"):
        remote.submit(request)
    small.store.gate.set()
    assert [len(each.result().vectors["item"]) for each in waiting] == [1, 1]
    assert remote.lookup(request).vectors


def test_cancelled_lookup_is_cancelled_at_the_node(remote, small):
    small.store.gate.clear()
    pending = remote.submit(LookupRequest({"item": JaggedKeys(np.array([15]), 1)}))
    assert pending.cancel()
    with pytest.raises(CancelledError):
        pending.result()
    until(lambda: not nodes_of(remote)[0].in_flight)


def test_node_with_another_model_yaml_is_rejected(serve, connect, small):
    served = small.node.models["words"]
    wider = EmbeddingTable.make("left", 5, model="words")
    tables = {**served.tables, "left": wider}
    features = {
        **served.engine.features,
        "left": replace(served.engine.features["left"], table=wider),
    }
    mine = LookupModel("words", 1, tables, features)
    url = serve().server.url
    with pytest.raises(
        ModelError, match=f"'left' of model 'words' .*: here dim 5.*{url} has dim 3"
    ):
        connect(url, described=mine)
    pooled = replace(served.engine.features["left"], pooling="mean")
    features = {**served.engine.features, "left": pooled}
    mine = LookupModel("words", 1, served.tables, features)
    with pytest.raises(ModelError, match=r"feature 'left' .*mean.*sum.* same model\.yaml"):
        connect(url, described=mine)
    shorter = replace(served.engine.features["left"], max_norm=1.5)
    mine = LookupModel("words", 1, served.tables, {**served.engine.features, "left": shorter})
    with pytest.raises(ModelError, match=r"feature 'left' .*max_norm: 1\.5.* same model\.yaml"):
        connect(url, described=mine)


def test_removed_version_is_noticed_by_a_lookup(serve, connect, small, monkeypatch):
    remote = connect(serve().server.url, model="words")
    nodes, served = remote._candidates.nodes, small.node.models["words"]
    with monkeypatch.context() as patch:
        # A poll that is the first to hear of the change makes it another error.
        patch.setattr(nodes, "_start_polls", lambda: None)
        until(lambda: not nodes._polls)
        time.sleep(0.2)  # so that a call of it that began before has started its polls
        until(lambda: not nodes._polls)
        serve_models(small, {**small.node.models, "words": replace(served, version=2)})
        small.state.serve(small.node)
        with pytest.raises(Unavailable, match="version 1 is not found"):
            remote.lookup(left(1))
        assert problems(remote)
    serve_models(small, {**small.node.models, "words": served})
    small.state.serve(small.node)
    until(lambda: not problems(remote))
    assert remote.lookup(left(1)).vectors


def test_restarted_node_with_another_model_yaml_is_rejected(small, connect, monkeypatch):
    """The shapes are equal, the vectors would be wrong."""
    feature = {"name": "left", "table": "left", "key_offset": 1}
    monkeypatch.setattr(support, "WORDS", {**support.WORDS, "features": [feature]})
    other = support.make_small()
    with running(small) as same, contextlib.closing(other.node):
        with running(small) as first:
            url = first.server.url
            alone = connect(url, model="words")
            both = connect(url, same.server.url, model="words")
            assert alone.lookup(left(1)).vectors["left"].tolist() == [row(1, 3)]
            nodes, refused = alone._candidates.nodes, []
            # What a node serves is not asked for now: a lookup is the first to hear of the change.
            monkeypatch.setattr(nodes, "_start_polls", lambda: None)

        def is_refused():
            try:
                assert alone.lookup(left(1)).vectors["left"].tolist() == [row(1, 3)]
            except Unavailable as error:
                refused.append(str(error))
            return any("another model under the same version" in text for text in refused)

        with running(other, grpc={"port": int(url.rsplit(":", 1)[1])}):
            until(is_refused)
            monkeypatch.undo()
            until(lambda: "same model.yaml" in problems(alone).get(url, ""))
            for key in range(4):
                assert both.lookup(left(key)).vectors["left"].tolist() == [row(key, 3)]


class Faulty(LeastBusy):
    """A picker that raises in one method."""

    def __init__(self, place):
        self.place = place

    def pick(self, among):
        return among[0] if self.place != "pick" else {}["pick"]

    def record(self, target, code, seconds):
        assert self.place != "record", "record"


@pytest.mark.parametrize("place", ["pick", "record"])
def test_failing_picker_fails_the_lookup(serve, connect, place):
    remote = connect(serve().server.url, model="words", in_flight=1, picker=Faulty(place))
    for _ in range(3):  # none is in flight any more
        with pytest.raises((KeyError, AssertionError), match=place):
            remote.submit(left(1)).result(20)
    remote._picker.place = ""
    assert remote.lookup(left(1)).vectors["left"].tolist() == [row(1, 3)]


def test_api_key_is_sent(serve, connect, key_guard):
    url = serve(key_guard).server.url
    assert "UNAUTHENTICATED" in problems(connect(url, model="words"))[url]
    assert connect(url, model="words", api_key="r" * 16).lookup(left(1)).vectors


class Impostor(grpc.GenericRpcHandler):
    """A node that describes a model and answers lookups of it with something else."""

    def __init__(self, described, answer):
        serving = pb.ServingResponse(ready=True)
        serving.models.add(model="words", version=1, digest=described.digest)
        self._answers = {"Describe": described, "Lookup": answer, "Serving": serving}

    def service(self, details):
        reported = self._answers[details.method.rpartition("/")[2]].SerializeToString()
        return grpc.unary_unary_rpc_method_handler(lambda _request, _context: reported)


@pytest.mark.parametrize(
    "given", [{"vectors": bytes(13)}, {"sources": b"xx"}, {"versions": bytes(9)}, {"sources": b""}]
)
def test_answer_of_the_wrong_shape_is_an_error(connect, small, given):
    model = model_of(small.node.models["words"])
    reported = describe_model(model)
    right = {"vectors": bytes(12), "sources": b"x", "versions": bytes(8)}
    answer = pb.LookupResponse(digest=reported.digest, **{**right, **given})
    server = grpc.server(ThreadPoolExecutor(2))
    handler = Impostor(reported, answer)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        remote = connect(f"127.0.0.1:{port}", described=model)
        with pytest.raises(HpsError, match="a lookup node sent"):
            remote.lookup(replace(left(1), want_source=True))
    finally:
        server.stop(None).wait()


def test_concurrent_lookups_get_their_own_answers(serve, connect):
    remote = connect(serve().server.url, model="words")
    wrong = []

    def ask(seed):
        rng = np.random.default_rng(seed)
        for _ in range(40):
            keys = rng.integers(0, 20, 9)
            found = remote.lookup(left(*keys)).vectors["left"]
            if found.tolist() != [row(int(key), 3) for key in keys]:
                wrong.append(keys)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert nodes_of(remote)[0].in_flight == 0


@pytest.fixture
def two(small):
    """Two nodes with different rows, each with its port."""
    other = support.make_small()
    with contextlib.closing(other.node), running(small) as one, running(other) as two:
        yield (small, one.server.url), (other, two.server.url)
        small.store.gate.set()
        other.store.gate.set()


def test_hanging_node_is_skipped(two, connect):
    (first, _), (second, _) = two
    for small in (first, second):
        small.memory.insert = lambda *_args: None  # the store is read each time
    remote = connect(*[url for _, url in two], attempt_s=0.05)
    request = LookupRequest({"item": JaggedKeys(np.array([15]), 1)}, time.monotonic() + 30)
    for hangs in (first, second):
        hangs.store.gate.clear()
        for _ in range(2):  # in either order
            assert remote.lookup(request).vectors["item"].tolist() == [row(15, 2)]
        hangs.store.gate.set()
    assert sum(node.retries for node in nodes_of(remote)) >= 1


def test_without_retries_a_node_gets_the_whole_deadline(two, connect):
    (first, _), (second, _) = two
    for small in (first, second):
        small.memory.insert = lambda *_args: None
        small.store.gate.clear()
    spent = connect(*[url for _, url in two], attempt_s=0.05, budget=RetryBudget(0))
    request = LookupRequest({"item": JaggedKeys(np.array([15]), 1)}, time.monotonic() + 60)
    pending = spent.submit(request)
    refused = connect(*[url for _, url in two], attempt_s=0.05, retries=0).submit(request)
    with pytest.raises(DeadlineExceeded):  # two nodes are asked, neither answers in time
        connect(*[url for _, url in two], attempt_s=0.05, retries=1).lookup(
            replace(request, deadline=time.monotonic() + 0.5)
        )
    for small in (first, second):
        small.store.gate.set()
    for each in (pending, refused):
        assert each.result(60).vectors["item"].tolist() == [row(15, 2)]


def test_draining_node_is_used_if_there_is_no_other(two, connect):
    (first, first_url), (second, second_url) = two
    remote = connect(first_url, second_url, model="words")

    def counted(small):
        return small.state.entries["words.lookup"].statistics.success_count

    first.state.phase = "stopping"
    until(lambda: problems(remote).keys() == {first_url})
    before = counted(first)
    for key in range(6):
        remote.lookup(left(key))
    assert counted(first) == before
    second.state.phase = "stopping"
    until(lambda: problems(remote).keys() == {first_url, second_url})
    assert remote.lookup(left(1)).vectors["left"].tolist() == [row(1, 3)]
    assert "shutting down" in remote._candidates.nodes.problem


def test_name_resolves_to_changing_nodes(small):
    """On one port, as replicas behind a name have it."""
    known = {"name": ["127.0.0.1"]}

    def resolve(host):
        if not known[host]:
            raise OSError(-2, "Name or service not known")
        return known[host]

    with running(small) as first:
        port = int(first.server.url.rsplit(":", 1)[1])
        nodes = NodeRegistry([f"dns:///name:{port}"], resolve_s=0.01, resolve=resolve)
        with contextlib.closing(nodes):
            remote = RemoteLookup(Candidates(model_of(small.node.models["words"]), nodes))
            assert remote.lookup(left(1)).vectors["left"].tolist() == [row(1, 3)]
            with running(small, grpc={"host": "127.0.0.2", "port": port}):
                known["name"] = ["127.0.0.1", "127.0.0.2"]
                until(lambda: len(remote._candidates.ready) == 2)
                assert [node.address for node in nodes.all] == [
                    f"127.0.0.1:{port}",
                    f"127.0.0.2:{port}",
                ]
                known["name"] = ["127.0.0.2"]
                until(lambda: len(nodes.all) == 1)
                assert remote.lookup(left(2)).vectors["left"].tolist() == [row(2, 3)]
                known["name"] = []  # its state is kept
                until(lambda: "Name or service not known" in str(nodes._addresses.problems))
                assert remote.lookup(left(3)).vectors["left"].tolist() == [row(3, 3)]


def test_retries_stay_within_their_budget(small, connect):
    with running(small) as one:
        url = one.server.url
    remote = connect("127.0.0.1:1", url, model="words", budget=RetryBudget(0))
    assert nodes_of(remote)[0].standing == nodes_of(remote)[1].standing == "unreachable"
    with running(small, grpc={"port": int(url.rsplit(":", 1)[1])}):
        until(lambda: len(remote._candidates.ready) == 1)
    # The node has gone again, without notice.
    with pytest.raises(Unavailable):
        remote.lookup(left(1))
    assert sum(node.retries for node in nodes_of(remote)) == 0


def test_certificates_are_checked_against_the_resolved_name(small, tmp_path):
    authority = redis_servers.Certificates(tmp_path / "ca")
    certificate, key = authority.make("node", host="lookup.test")
    tls = TlsSettings(certificate_file=certificate, key_file=key)
    model = model_of(small.node.models["words"])
    with running(small, grpc={"tls": tls}) as server:
        port = server.server.url.rsplit(":", 1)[1]

        def nodes(host, **given):
            roots = ClientTls(authority.ca.read_bytes())
            return contextlib.closing(
                NodeRegistry([f"dns:///{host}:{port}"], lambda: roots, **given)
            )

        with nodes("lookup.test", resolve=lambda _host: ["127.0.0.1"]) as found:
            remote = RemoteLookup(Candidates(model, found))
            assert remote.lookup(left(1)).vectors["left"].tolist() == [row(1, 3)]
        with nodes("other.test", resolve=lambda _host: ["127.0.0.1"]) as found:
            assert "other.test" in found.problem or "UNAVAILABLE" in found.problem


def test_single_lookups_are_answered_on_one_thread(remote):
    (target,) = remote._candidates.nodes.all
    until(lambda: target._connection.keeps_thread)
    threads, reported = set(), remote._finish_attempt
    remote._finish_attempt = lambda *given: (
        threads.add(threading.current_thread()),
        reported(*given),
    )
    for key in range(5):
        remote.lookup(LookupRequest({"item": JaggedKeys(np.array([key]), 1)}))
        until(lambda: not target.in_flight)
    assert len(threads - {threading.current_thread()}) == 1
