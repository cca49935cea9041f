"""Addresses as people write them."""

from __future__ import annotations

import pytest

from specsplit.core.errors import InvalidRequest
from specsplit.rpc.clients import RemoteDrafter, RemoteVerifier
from specsplit.rpc.transport import dial_target, format_address, parse_address


@pytest.mark.parametrize(
    ("address", "host", "port", "target"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051, "ipv4:127.0.0.1:50051"),
        ("localhost:1", "localhost", 1, "dns:localhost:1"),
        ("target-0.target.specsplit.svc:65535", "target-0.target.specsplit.svc", 65535, None),
        ("unix:80", "unix", 80, "dns:unix:80"),
        ("[::1]:50051", "::1", 50051, "ipv6:[::1]:50051"),
        ("[fe80::1%eth0]:7", "fe80::1%eth0", 7, "ipv6:[fe80::1%eth0]:7"),
    ],
)
def test_an_address_is_a_host_and_a_port(address: str, host: str, port: int, target: str | None):
    assert parse_address(address) == (host, port)
    assert format_address(host, port) == address
    assert dial_target(address) == (target or f"dns:{address}")


MALFORMED = [
    "", ":", "host", "host:", ":50051", "host:http", "host:-1", "host:65536", "host:999999", "host:1:2", "::1:50051",
    "[::1]", "[::1]:", "[nohost]:1", "[127.0.0.1]:1", "http://host:1", "host:1/path", "unix:///tmp/socket", "a b:1",
    "host:٣", "host:1\n", "-host:1", "host,other:1", "user@host:1", "h\0st:1",
]  # fmt: skip


@pytest.mark.parametrize("address", MALFORMED, ids=repr)
def test_a_malformed_address_is_refused_by_name(address: str):
    for client in (RemoteDrafter, RemoteVerifier):
        with pytest.raises(InvalidRequest, match="HOST:PORT") as raised:
            client(address)
        assert repr(address) in str(raised.value)
    with pytest.raises(InvalidRequest):
        parse_address(address, listening=True)


def test_port_0_is_for_listening_only():
    assert parse_address("0.0.0.0:0", listening=True) == ("0.0.0.0", 0)
    with pytest.raises(InvalidRequest, match="HOST:PORT"):
        parse_address("127.0.0.1:0")
