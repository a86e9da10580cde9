"""Resolution of the addresses in `lookup.nodes`."""

from socket import AF_INET, AF_INET6, AI_ADDRCONFIG, SOCK_STREAM

import pytest

from hps.lookup.remote.addresses import NodeAddress, NodeResolver, resolve_addresses


def test_addresses_are_kept_and_dns_names_resolved():
    known = {"replicas": ["10.0.0.2", "10.0.0.1", "10.0.0.2"], "six": ["fd00::1"]}
    addresses = NodeResolver(
        ["host:8001", "dns:///replicas:8001", "host:8001", "dns:///six:1"], known.__getitem__
    )
    assert addresses.may_change
    assert addresses.now() == [
        NodeAddress("host:8001"),
        NodeAddress("10.0.0.1:8001", "replicas"),
        NodeAddress("10.0.0.2:8001", "replicas"),
        NodeAddress("[fd00::1]:1", "six"),
    ]
    known["replicas"] = ["10.0.0.3"]
    assert NodeAddress("10.0.0.3:8001", "replicas") in addresses.now()
    assert NodeAddress("10.0.0.1:8001", "replicas") not in addresses.now()
    assert not NodeResolver(["host:8001"]).may_change


def test_unresolved_name_keeps_its_last_addresses():
    def resolve(_host):
        if away:
            raise OSError(-2, "Name or service not known")
        return ["10.0.0.1"]

    away = True
    addresses = NodeResolver(["dns:///name:8001"], resolve)
    assert addresses.now() == []
    assert addresses.problems == {
        "dns:///name:8001": "cannot resolve name: Name or service not known"
    }
    away = False
    assert addresses.now() == [NodeAddress("10.0.0.1:8001", "name")]
    assert not addresses.problems
    away = True
    assert addresses.now() == [NodeAddress("10.0.0.1:8001", "name")]
    assert addresses.problems


def test_system_resolver_accepts_an_ip_address():
    assert "127.0.0.1" in resolve_addresses("127.0.0.1")


def infos(addresses):
    """As the system's resolver tells them."""
    return [
        (AF_INET6 if ":" in each else AF_INET, SOCK_STREAM, 6, "", (each, 0)) for each in addresses
    ]


@pytest.mark.parametrize(
    ("known", "taken"),
    [
        (["fd00::1", "10.0.0.1", "fd00::2", "10.0.0.2"], ["10.0.0.1", "10.0.0.2"]),
        (["fd00::1", "fd00::2"], ["fd00::1", "fd00::2"]),
    ],
)
def test_node_with_ipv4_and_ipv6_addresses_counts_once(monkeypatch, known, taken):
    monkeypatch.setattr("socket.getaddrinfo", lambda *_asked, **_options: infos(known))
    assert resolve_addresses("replicas") == taken


@pytest.mark.parametrize("without_ipv4", [OSError(-9, "Address family"), infos(["::1"])])
def test_loopback_is_resolved_without_another_ipv4_address(monkeypatch, without_ipv4):
    def resolved(*_asked, flags, **_options):
        if not flags & AI_ADDRCONFIG:
            return infos(["::1", "127.0.0.1"])
        if isinstance(without_ipv4, OSError):
            raise without_ipv4
        return without_ipv4

    monkeypatch.setattr("socket.getaddrinfo", resolved)
    assert resolve_addresses("localhost") == ["127.0.0.1"]
