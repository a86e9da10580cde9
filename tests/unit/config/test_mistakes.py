"""Errors of a configuration: one line each with its place, all at once, without secrets."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.config import Configuration, InvalidConfiguration, configuration_from, load_config
from hps.config.schema import Settings
from hps.errors import ConfigError

Write = Any


def load(
    path: Path | None, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Configuration:
    return load_config(path, overrides, environ=environ or {})


def mistakes(
    path: Path | None, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(path, overrides, environ)
    return str(error.value).splitlines()


LINE = [
    # text, the one line after "FILE"
    ("sever: {}", ":1: sever: unknown key; did you mean 'server'?"),
    ("server: {prt: 1}", ":1: server.prt: unknown key; the keys are http, grpc, admin, "),
    ("tiers:\n  rocksdb:\n    pth: x", ":3: tiers.rocksdb.pth: unknown key; did you mean 'path'?"),
    (
        "zzz: 1",
        ":1: zzz: unknown key; the keys are models, tiers, updates, lookup, dense, server, auth",
    ),
    (
        "server:\n  grpc: {calls: auto}",
        ":2: server.grpc.calls: the setting was removed: gRPC has one transport",
    ),
    ("server: 5", ":1: server: expected a mapping with http, grpc, admin,"),
    ("server: []", ":1: server: expected a mapping with http, grpc, admin,"),
    (
        "server: {http: {port: 70000}}",
        ":1: server.http.port: expected a whole number from 0 to 65535, found 70000",
    ),
    (
        "server: {http: {port: yes}}",
        ':1: server.http.port: expected a whole number from 0 to 65535, found "yes"',
    ),
    (
        "server: {http: {port: true}}",
        ":1: server.http.port: expected a whole number from 0 to 65535, found true",
    ),
    (
        "server: {http: {port: 1.5}}",
        ":1: server.http.port: expected a whole number from 0 to 65535, found 1.5",
    ),
    (
        "server: {http: {port: null}}",
        ":1: server.http.port: expected a whole number from 0 to 65535, found null",
    ),
    ("server: {http: {host: 5}}", ":1: server.http.host: expected text, found 5"),
    ("server: {http: {host: ''}}", ':1: server.http.host: expected text, found ""'),
    (
        "tiers: {cpu_cache: {capacity_bytes: 4GB}}",
        ':1: tiers.cpu_cache.capacity_bytes: expected a whole number from 0, found "4GB"; sizes are in '
        "bytes: write 4000000000, or 4294967296 for 4 GiB",
    ),
    (
        "tiers: {cpu_cache: {capacity_bytes: 1.5 GiB}}",
        ':1: tiers.cpu_cache.capacity_bytes: expected a whole number from 0, found "1.5 GiB"; sizes are '
        "in bytes: write 1610612736",
    ),
    (
        "tiers: {rocksdb: {block_size: 4k}}",
        ':1: tiers.rocksdb.block_size: expected a whole number from 256, found "4k"; sizes are in bytes: '
        "write 4000, or 4096 for 4 kiB",
    ),
    (
        "server: {batching: {max_rows: 4k}}",
        ':1: server.batching.max_rows: expected a whole number from 1, found "4k"',
    ),
    (
        "server: {request_timeout_ms: 10s}",
        ':1: server.request_timeout_ms: expected a number above 0, found "10s"; times are in '
        "milliseconds here: write 10000",
    ),
    (
        "server: {drain_s: 2min}",
        ':1: server.drain_s: expected a number from 0, found "2min"; times are in seconds here: write 120',
    ),
    ("server: {docs: 5}", ":1: server.docs: expected true or false, found 5"),
    (
        "server: {request_timeout_ms: .nan}",
        ":1: server.request_timeout_ms: expected a number above 0, found nan",
    ),
    (
        "server: {request_timeout_ms: .inf}",
        ":1: server.request_timeout_ms: expected a number above 0, found inf",
    ),
    (
        "tiers: {cpu_cache: {share: 0}}",
        ":1: tiers.cpu_cache.share: expected a number above 0 up to 1 or null, found 0",
    ),
    (
        "tiers: {rocksdb: {layout: HPS}}",
        ":1: tiers.rocksdb.layout: expected native or hps, found \"HPS\"; did you mean 'hps'?",
    ),
    ("tiers: {rocksdb: {path: 5}}", ":1: tiers.rocksdb.path: expected a path, found 5"),
    (
        "tiers: {rocksdb: {path: 's3://bucket/models'}}",
        ":1: tiers.rocksdb.path: remote locations are not supported; copy the files",
    ),
    ("models: {serve: {a b: {}}}", ":1: models.serve.a b: the name 'a b' must be 1 to 120 of"),
    (
        "models: {serve: {m: {tables: {t: {default: [x]}}}}}",
        ":1: models.serve.m.tables.t.default: expected a number, a list of numbers or null, found",
    ),
    (
        "models: {serve: {m: {tables: {t: {miss_policy: {min_hit_rate: 0.5}}}}}}",
        ":1: models.serve.m.tables.t.miss_policy.min_hit_rate: needs kind default_then_",
    ),
    (
        "models: {serve: {m: {dense: {}}}}",
        ":1: models.serve.m.dense.outputs: is missing; expected a list of mappings with name,",
    ),
    (
        "models: {serve: {m: {dense: {outputs: []}}}}",
        ":1: models.serve.m.dense.outputs: expected a list of mappings with name,",
    ),
    (
        "server:\n  http: {port: 8002}",
        ":2: server.admin.port: is 8002, the same as server.http.port; every listener needs its own",
    ),
    (
        "server:\n  shared_memory: true\n  workers: 2",
        ":2: server.shared_memory: can't be used with 2 workers",
    ),
    (
        "server:\n  role: frontend",
        ":2: lookup.nodes: is empty, but server.role is frontend; name the gRPC ports of the lookup",
    ),
    (
        "lookup: {nodes: ['a:1']}\nserver:\n  role: frontend\n  workers: 2",
        ":4: server.workers: is 2, but server.role is frontend; start several front ends instead",
    ),
    (
        "server:\n  role: lookup\n  grpc: null",
        ":3: server.grpc: is null, but server.role is lookup: front ends use gRPC",
    ),
    (
        "lookup: {nodes: ['http://a:1']}",
        ":1: lookup.nodes[0]: expected host:port or dns:///name:port, found",
    ),
    (
        "lookup: {tls: {certificate_file: c.pem}}",
        ":1: lookup.tls.key_file: must be set together with certificate_file",
    ),
    (
        "auth: {mode: of}",
        ":1: auth.mode: expected off, api_key or null, found \"of\"; did you mean 'off'?",
    ),
    (
        "auth: {keys_file: k}",
        ":1: auth.mode: must be set with auth.keys_file: api_key or off",
    ),
    (
        "auth: {mode: api_key}",
        ":1: auth.mode: is api_key, but neither auth.keys_file nor auth.keys",
    ),
    (
        "- a",
        ": expected a mapping with models, tiers, updates, lookup, dense, server, auth, found ['a']",
    ),
    ("5", ": expected a mapping with models, tiers, updates, lookup, dense, server, auth, found 5"),
    ("server: {", ":2:1: not valid YAML: did not find expected node content"),
    ("server: {}\nserver: {}", ":2:1: duplicate key 'server', also on line 1"),
]


@pytest.mark.parametrize(("text", "line"), LINE, ids=[text for text, _ in LINE])
def test_each_mistake_is_one_line_with_place_and_remedy(write: Write, text: str, line: str) -> None:
    path = write(text)
    found = mistakes(path)
    assert len(found) == 1, found
    assert found[0].startswith(f"{path}{line}")


def test_all_mistakes_are_reported_at_once(write: Write) -> None:
    path = write(
        "tiers:\n"
        "  rocksdb: {pth: x, layout: nativ}\n"
        "server:\n"
        "  max_keys: 0\n"
        "  http: {port: 8002}\n"
        "auth: {keys_file: k}\n"
    )
    found = mistakes(path, ["server.drain_s=x", "a.b=1"], {"HPS__UPDATES__X": "1"})
    assert [line.split(": ")[:2] for line in found] == [
        [f"{path}:2", "tiers.rocksdb.layout"],
        [f"{path}:2", "tiers.rocksdb.pth"],
        [f"{path}:4", "server.max_keys"],
        [f"{path}:5", "server.admin.port"],
        [f"{path}:6", "auth.mode"],
        ["--set", "server.drain_s"],
        ["HPS__UPDATES__X", "updates.x"],
        ["--set", "a"],
    ]


def test_duplicate_key_hides_no_other_mistake(write: Write) -> None:
    path = write(
        "sever: {}\nserver:\n  drain_s: 1\n  drain_s: x\n  5: 1\n",
    )
    lines = [
        f"{path}:1: sever: unknown key; did you mean 'server'?",
        f"{path}:4:3: duplicate key 'drain_s', also on line 3",
        f"{path}:4: server.drain_s: expected a number from 0",
        f"{path}:5:3: the key 5 must be text; put it in quotes",
    ]
    found = mistakes(path)
    assert len(found) == len(lines), found
    for line, begins in zip(found, lines, strict=True):
        assert line.startswith(begins), found


def test_invalid_value_causes_no_second_mistake(write: Write) -> None:
    """Port x falls back to 8000 for the other checks; that 8000 must not be blamed."""
    path = write("server: {http: {port: x}, admin: {port: 8000}}")
    assert len(mistakes(path)) == 1


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("server.http.prt=1", "--set: server.http.prt: no such setting; did you mean 'port'?"),
        ("Server.http.port=1", "--set: Server: no such setting; did you mean 'server'?"),
        ("server.http.port", "--set: expected a.b=value, found 'server.http.port'"),
        ("=5", "--set: expected a.b=value, found ''"),
        ("server..port=5", "--set: server.: no such setting; the settings are http, grpc, admin,"),
        ("auth.keys.0=x", "--set: auth.keys.0: has no parts; a list is set as a whole"),
        ("server.http.port.x=1", "--set: server.http.port.x: has no parts"),
        ("server.http.port=[1", "--set: server.http.port: not valid YAML: did not find expected"),
        (
            "server.http={port: 1, port: 2}",
            "--set: server.http: duplicate key 'port', also on line 1",
        ),
        ("server.http.port=x", "--set: server.http.port: expected a whole number from 0 to 65535,"),
    ],
)
def test_invalid_override_names_the_setting(override: str, line: str) -> None:
    found = mistakes(None, [override])
    assert len(found) == 1
    assert found[0].startswith(line)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        (
            "HPS__SERVR__PORT",
            "1",
            "HPS__SERVR__PORT: servr: no such setting; did you mean 'server'?",
        ),
        ("HPS__", "1", "HPS__: no such setting; the settings are models,"),
        (
            "HPS__SERVER__HTTP__PORT",
            "",
            "environment HPS__SERVER__HTTP__PORT: server.http.port: exp",
        ),
        (
            "HPS__DENSE__PROVIDER",
            "CPU",
            "environment HPS__DENSE__PROVIDER: dense.provider: expected",
        ),
    ],
)
def test_invalid_variable_names_itself(name: str, text: str, line: str) -> None:
    found = mistakes(None, environ={name: text})
    assert len(found) == 1
    assert found[0].startswith(line)


@pytest.mark.parametrize(
    "auth",
    [
        "{keys: hunter2hunter2hunter2}",
        "{keys: [{name: a, role: read, key: hunter2}]}",
        "{keys: [{name: a, role: rod, key: hunter2hunter2hunter2}]}",
        "{keys: [{name: a, role: read, kee: hunter2hunter2hunter2}]}",
        "{keys: [hunter2hunter2hunter2]}",
        "{keys: {hunter2hunter2hunter2: 5}, mode: api_key}",
        "{keys: [{name: a, role: read, key: [hunter2hunter2hunter2]}]}",
    ],
)
def test_secrets_are_never_quoted(write: Write, auth: str) -> None:
    for lines in (mistakes(write(f"auth: {auth}")), mistakes(None, [f"auth={auth}"])):
        assert "hunter2" not in "\n".join(lines)


def test_problems_are_available_as_objects(write: Write) -> None:
    with pytest.raises(InvalidConfiguration) as error:
        load(write("server: {http: {port: x}}"))
    (problem,) = error.value.problems
    assert problem.path == ("server", "http", "port")


NAMES = ["models", "tiers", "server", "auth", "http", "port", "keys", "key", "serve", "tables"]
NAMES += ["default", "dense", "outputs", "name", "m", "miss_policy", "kind"]
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(list(Settings.model_fields)), TREES, max_size=4))
def test_any_value_is_accepted_or_rejected_cleanly(data: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidConfiguration):
        configuration_from(data, environ={})


@pytest.mark.parametrize(
    ("access", "stream", "line"),
    [
        (
            "read_only",
            "kafka: {brokers: k:1}",
            "updates.kafka: needs a store that gets the updates",
        ),
        ("read_only", "directory: {path: in}", "updates.directory: needs a store to write"),
        ("secondary", "directory: {path: in}", "updates.directory: needs a store to write"),
        ("secondary", "kafka: {brokers: k:1}", None),
        ("primary", "directory: {path: in}", None),
    ],
)
def test_updates_need_a_store(write: Write, access: str, stream: str, line: str | None) -> None:
    path = write(f"tiers: {{rocksdb: {{access: {access}}}}}\nupdates: {{{stream}}}")
    if line is None:
        load(path)
    else:
        (mistake,) = mistakes(path)
        assert line in mistake
        assert f"tiers.rocksdb.access is {access}" in mistake
    load(path, ["tiers.redis={addresses: [r:1]}"])
