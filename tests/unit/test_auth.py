"""Identities that certificates prove, and the table of methods."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specsplit.core.errors import AccessDenied
from specsplit.rpc.auth import ALLOWED, ROLES, Guard, identity_of, peer_identity, server_name, with_article
from specsplit.rpc.pb import draft_pb2, stage_pb2, target_pb2


def _context(*uris: str, peer: str = "ipv4:10.0.0.7:4711") -> Any:
    return SimpleNamespace(auth_context=lambda: {"peer_uri": [uri.encode() for uri in uris]}, peer=lambda: peer)


@pytest.mark.parametrize("role", ROLES)
def test_a_certificate_proves_its_role_and_its_name(role: str):
    for uri in (f"spiffe://specsplit/{role}", f"spiffe://specsplit/{role}/eu-1"):
        identity = peer_identity(_context("https://example.org", uri))
        assert (identity.name, identity.role, identity.is_authenticated) == (uri, role, True)
    assert server_name(role) == f"{role}.specsplit"  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "uris",
    [
        (),
        ("spiffe://specsplit/",),
        ("spiffe://specsplit/admin",),
        ("spiffe://specsplit/targets",),
        ("spiffe://specsplit/target/",),
        ("spiffe://specsplit/target\n",),
        ("spiffe://specsplit/target/../gateway",),
        ("spiffe://elsewhere/target",),
        ("x-spiffe://specsplit/target",),
        ("spiffe://specsplit/target", "spiffe://specsplit/gateway"),
    ],
)
def test_any_other_certificate_proves_no_role(uris: tuple[str, ...]):
    assert identity_of(uris) is None
    identity = peer_identity(_context(*uris))
    assert (identity.name, identity.role) == ("ipv4:10.0.0.7", None)


def test_the_table_has_every_method_that_is_served_and_no_other():
    files = draft_pb2, target_pb2, stage_pb2
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert {name for name in ALLOWED if name.startswith("/specsplit.")} == methods
    assert all(allowed for allowed in ALLOWED.values())


@pytest.mark.parametrize("method", [*ALLOWED, "/specsplit.v1.TargetService/Unheard", "/other.Service/Call"])
def test_only_the_roles_of_the_table_may_call_a_method(method: str):
    guard = Guard(is_secure=True)
    for role in ROLES:
        context = _context(f"spiffe://specsplit/{role}")
        if role in ALLOWED.get(method, ()):
            assert guard.admit(context, method).role == role
        else:
            with pytest.raises(AccessDenied, match=f"(?i)^{with_article(role)} may not call"):
                guard.admit(context, method)
    with pytest.raises(AccessDenied, match="without a role"):
        guard.admit(_context(), method)
    assert Guard(is_secure=False).admit(_context(), method).role is None
