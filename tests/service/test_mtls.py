"""Links with certificates: who is refused, by whom, and that a rotation loses no stream."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specsplit.core.errors import AccessDenied, InvalidSettings, WorkerUnreachable
from specsplit.core.types import Budget, StreamLimits
from specsplit.rpc.auth import ALLOWED, ROLES, LinkRole, server_name
from specsplit.rpc.clients import RemoteDrafter, RemoteVerifier
from specsplit.rpc.credentials import ON_LOOPBACK, Security
from specsplit.rpc.handshake import why_refused
from specsplit.rpc.pb import common_pb2, draft_pb2, stage_pb2, target_pb2
from specsplit.rpc.server import Server, SidePorts, serving
from specsplit.rpc.servicers import DraftService, TargetService
from specsplit.stages.wire.peer import StagePeer
from specsplit.stages.wire.servicer import StageService
from tests.contract.session_contract import Script
from tests.contract.verifier_contract import without_tree
from tests.support.certificates import Authority, Paths
from tests.support.fakes import FakeDraft, FakeTarget
from tests.support.processes import LIMIT_S
from tests.support.rpc_servers import LOOPBACK, duplex_status

DAY = timedelta(days=1)
STREAM_LIMITS = StreamLimits(4, 2, 2)
SERVERS: tuple[LinkRole, ...] = ("draft", "target", "stage")
REQUESTS: dict[str, Message] = {
    "Configure": stage_pb2.ConfigureRequest(chain=stage_pb2.ChainId(coordinator="c", number=1), num_stages=1),
    "Forward": stage_pb2.Frame(hello=stage_pb2.Hello(role=stage_pb2.STREAM_ROLE_COORDINATOR)),
    "GetTokenizer": target_pb2.GetTokenizerRequest(),
    "GenerateDrafts": draft_pb2.GenerateDraftsRequest(),
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def wrong(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Paths | None]:
    """Identities of an orchestrator, each wrong in one way."""
    uri, name = ["spiffe://specsplit/orchestrator"], ["orchestrator.specsplit"]
    other = Authority(tmp_path_factory.mktemp("other"), "other").role("orchestrator")
    return {
        "none": None,
        "other CA": Paths(other.cert, other.key, authority.ca),
        "expired": authority.sign("expired", uri, name, -2 * DAY, -DAY),
        "not yet valid": authority.sign("early", uri, name, DAY, 2 * DAY),
        "no role": authority.sign("nobody", [], name),
        "another domain": authority.sign("foreign", ["spiffe://elsewhere/orchestrator"], name),
        "two roles": authority.sign("two", ["spiffe://specsplit/orchestrator", "spiffe://specsplit/target"], name),
    }


@asynccontextmanager
async def served(role: LinkRole, security: Security) -> AsyncIterator[Server]:
    service = {
        "draft": lambda: DraftService(FakeDraft()),
        "target": lambda: TargetService(FakeTarget()),
        "stage": lambda: StageService(NoStage(), security=security),  # type: ignore[arg-type]
    }[role]()
    async with serving(LOOPBACK, [service], security=security) as server:
        yield server


class NoStage:
    """A stage whose methods must never be reached."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a caller that is refused reached {name}")


def methods(role: LinkRole) -> Iterator[tuple[str, bool, bool]]:
    """Yield path and arity of every method that the server of a role has, health and reflection included."""
    file = {"draft": draft_pb2, "target": target_pb2, "stage": stage_pb2}[role]
    (service,) = file.DESCRIPTOR.services_by_name.values()
    for method in service.methods:
        yield f"/{service.full_name}/{method.name}", method.client_streaming, method.server_streaming
    yield "/grpc.health.v1.Health/Check", False, False
    yield "/grpc.health.v1.Health/Watch", False, True
    yield "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", True, True


async def code_of(channel: grpc.aio.Channel, path: str, *arity: bool) -> grpc.StatusCode:
    """Call a method with a request that it understands, and return the status of its first answer."""
    request = REQUESTS.get(path.rpartition("/")[2], common_pb2.PingRequest()).SerializeToString()
    kind = "_".join("stream" if is_streamed else "unary" for is_streamed in arity)
    call = getattr(channel, kind)(path)
    try:
        async with asyncio.timeout(LIMIT_S):
            if kind == "stream_stream":
                return await duplex_status(call, request)
            await (call(request) if kind == "unary_unary" else call(request).read())
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def channel_to(server: Server, role: LinkRole, shown: Paths | None, ca: Path) -> grpc.aio.Channel:
    credentials = (
        grpc.ssl_channel_credentials(ca.read_bytes()) if shown is None else grpc.ssl_channel_credentials(*shown.bytes())
    )
    options = [("grpc.ssl_target_name_override", server_name(role)), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(server.address, credentials, options=options)


@pytest.mark.parametrize("role", SERVERS)
async def test_wrong_identities_are_refused_for_every_method(
    role: LinkRole, authority: Authority, wrong: dict[str, Paths | None]
):
    proves_nothing = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED
    async with served(role, authority.role(role).security(role)) as server:
        for name, shown in wrong.items():
            async with channel_to(server, role, shown, authority.ca) as channel:
                for path, *arity in methods(role):
                    code = await code_of(channel, path, *arity)
                    assert code is proves_nothing[name in ("no role", "another domain", "two roles")], (name, path)
        async with grpc.aio.insecure_channel(server.address) as channel:
            for path, *arity in methods(role):
                assert await code_of(channel, path, *arity) is grpc.StatusCode.UNAVAILABLE, ("plaintext", path)


@pytest.mark.parametrize("role", SERVERS)
async def test_a_role_may_call_what_the_table_says_and_nothing_else(role: LinkRole, authority: Authority):
    async with served(role, authority.role(role).security(role)) as server:
        for caller in ROLES:
            async with channel_to(server, role, authority.role(caller), authority.ca) as channel:
                for path, *arity in methods(role):
                    if caller not in ALLOWED[path]:
                        assert await code_of(channel, path, *arity) is grpc.StatusCode.PERMISSION_DENIED, (caller, path)
                    elif role != "stage" or path.startswith("/grpc."):
                        code = await code_of(channel, path, *arity)
                        assert code is not grpc.StatusCode.PERMISSION_DENIED, (caller, path)
                        assert code is not grpc.StatusCode.UNAVAILABLE, (caller, path)


async def test_a_stage_may_not_open_a_coordinators_stream_nor_the_other_way(authority: Authority):
    async with served("stage", authority.role("stage").security("stage")) as server:
        for caller, opened in (("stage", "COORDINATOR"), ("target", "PREVIOUS")):
            async with channel_to(server, "stage", authority.role(caller), authority.ca) as channel:
                call: Any = channel.stream_stream("/specsplit.v1.StageService/Forward")()
                hello = stage_pb2.Hello(role=stage_pb2.StreamRole.Value(f"STREAM_ROLE_{opened}"))
                await call.write(stage_pb2.Frame(hello=hello).SerializeToString())
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call.read()
                assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("draft", "its certificate is not one of a target"),
        ("other CA", "its certificate is not one of our CA"),
        ("expired", "its certificate has expired"),
        ("not yet valid", "its certificate is not valid yet"),
        ("URI alone", "its certificate is not one of a target"),
        ("plaintext", "it speaks no TLS"),
    ],
)
async def test_a_client_sends_nothing_to_a_server_that_proves_no_target(
    kind: str, reason: str, authority: Authority, tmp_path: Path
):
    uri, name = ["spiffe://specsplit/target"], ["target.specsplit"]
    other = Authority(tmp_path, "other").role("target")
    shown = {
        "draft": lambda: authority.role("draft"),
        "other CA": lambda: Paths(other.cert, other.key, authority.ca),
        "expired": lambda: authority.sign("expired-t", uri, name, -2 * DAY, -DAY),
        "not yet valid": lambda: authority.sign("early-t", uri, name, DAY, 2 * DAY),
        "URI alone": lambda: authority.sign("nameless-t", uri, ["localhost"]),
        "plaintext": lambda: None,
    }[kind]()
    calls: list[str] = []

    class Seen(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation: Any, details: Any) -> Any:
            calls.append(details.method)
            return await continuation(details)

    server = grpc.aio.server(interceptors=[Seen()])
    if shown is None:
        port = server.add_insecure_port(LOOPBACK)
    else:
        ca, key, cert = shown.bytes()
        port = server.add_secure_port(LOOPBACK, grpc.ssl_server_credentials([(key, cert)], ca, True))
    await server.start()
    address, security = f"127.0.0.1:{port}", authority.role("orchestrator").security("orchestrator")
    verifier = RemoteVerifier(address, call_timeout_s=float(LIMIT_S), security=security)
    try:
        with pytest.raises(WorkerUnreachable):
            await verifier.ping()
        assert (await why_refused(address, "target", security, LIMIT_S) or "").startswith(reason)
        assert calls == []
    finally:
        await verifier.aclose()
        await server.stop(None)


async def test_the_reason_of_a_refusal_is_told_on_both_sides(authority: Authority, tmp_path: Path):
    async with served("target", authority.role("target").security("target")) as server:
        mine = authority.role("orchestrator").security("orchestrator")
        assert await why_refused(server.address, "target", mine, LIMIT_S) is None
        reason = await why_refused(server.address, "target", ON_LOOPBACK, LIMIT_S)
        assert reason == "it asks for a certificate, which the --tls options name"
        # An orchestrator of another CA that trusts the target's: only the target can refuse.
        other = Authority(tmp_path, "both").role("orchestrator")
        both = tmp_path / "bundle.pem"
        both.write_bytes(other.ca.read_bytes() + authority.ca.read_bytes())
        stranger = Paths(other.cert, other.key, both).security("orchestrator")
        assert (await why_refused(server.address, "target", stranger, LIMIT_S) or "").startswith("it refuses our")
    async with served("target", ON_LOOPBACK) as plain:
        assert await why_refused(plain.address, "target", ON_LOOPBACK, LIMIT_S) is None


async def test_a_session_of_another_identity_can_neither_be_used_nor_ended(authority: Authority):
    mine, other = (authority.role("gateway", name).security("gateway") for name in ("alice", "bob"))
    target, turn = FakeTarget(), Script().first()
    service = TargetService(target, lambda: len(target.slots))
    async with serving(LOOPBACK, [service], security=authority.role("target").security("target")) as server:
        alice = RemoteVerifier(server.address, security=mine)
        bob = RemoteVerifier(server.address, security=other)
        try:
            verdict = await alice.verify(turn, without_tree(turn))
            with pytest.raises(AccessDenied):
                await bob.verify(turn, without_tree(turn))
            stream = bob.open_stream(turn, STREAM_LIMITS)
            with pytest.raises(AccessDenied):
                await stream.next_commit()
            await bob.close(turn.session)  # a client's close never fails
            assert turn.session in target.slots
            assert await alice.verify(turn, without_tree(turn)) == verdict or verdict.token_ids
            await alice.close(turn.session)
            assert turn.session not in target.slots
        finally:
            await alice.aclose()
            await bob.aclose()


async def test_a_draft_keeps_sessions_apart_as_well(authority: Authority):
    securities = [authority.role("gateway", name).security("gateway") for name in ("alice", "bob")]
    async with served("draft", authority.role("draft").security("draft")) as server:
        alice, bob = (RemoteDrafter(server.address, security=security) for security in securities)
        try:
            turn, budget = Script().first(), Budget(4, 2, 2)
            await alice.propose(turn, 0, budget)
            with pytest.raises(AccessDenied):
                await bob.propose(turn, 0, budget)
        finally:
            await alice.aclose()
            await bob.aclose()


async def test_a_rotation_loses_no_stream_and_new_calls_use_the_new_files(tmp_path: Path):
    old, new = Authority(tmp_path / "old", "old"), Authority(tmp_path / "new", "new")
    files = {role: old.role(role) for role in ("target", "orchestrator")}
    securities = {role: paths.security(role) for role, paths in files.items()}
    async with served("target", securities["target"]) as server:
        verifier = RemoteVerifier(server.address, security=securities["orchestrator"])
        other = RemoteVerifier(server.address, security=securities["orchestrator"])
        try:
            turn = Script().first()
            stream = verifier.open_stream(turn, STREAM_LIMITS)
            assert await stream.next_commit() is not None
            for role, paths in files.items():
                paths.replace_with(new.role(role))
            certificates = securities["orchestrator"].certificates
            assert certificates is not None
            certificates.look()
            assert certificates.version == 2
            # A new connection shows and asks for the new certificates; with the old ones nobody comes in.
            assert (await verifier.ping()).role == "target"
            assert (await other.ping()).role == "target"
            async with channel_to(server, "target", old.role("orchestrator"), old.ca) as channel:
                code = await code_of(channel, "/specsplit.v1.TargetService/Ping", False, False)
                assert code is grpc.StatusCode.UNAVAILABLE
            # The stream goes on where it is.
            assert await stream.next_commit() is not None
            await stream.close()
        finally:
            await verifier.aclose()
            await other.aclose()


async def test_files_that_do_not_fit_together_leave_the_certificate_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    authority = Authority(tmp_path)
    paths = authority.role("target")
    certificates = paths.security("target").certificates
    assert certificates is not None
    before = certificates.current
    kept = paths.cert.read_bytes()
    paths.cert.write_bytes(authority.role("draft").cert.read_bytes())
    certificates.look()
    assert (certificates.version, certificates.current) == (1, before)
    assert "the certificate before stays in use" in caplog.text
    paths.cert.write_bytes(kept)
    certificates.look()
    assert certificates.version == 2
    paths.key.unlink()
    certificates.look()
    assert certificates.version == 2


def test_wrong_files_are_refused_at_start_in_one_sentence(authority: Authority, tmp_path: Path):
    good, draft = authority.role("target"), authority.role("draft")
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    stranger = Authority(tmp_path, "stranger").ca
    uri, name = ["spiffe://specsplit/target"], ["target.specsplit"]
    cases = [
        (Paths(tmp_path / "none.pem", good.key, good.ca), "cannot be read"),
        (Paths(good.cert, draft.key, good.ca), "is not that of the certificate"),
        (Paths(good.cert, good.key, empty), "holds no certificates of a CA"),
        (Paths(empty, good.key, good.ca), "no certificate and key in PEM"),
        (Paths(good.cert, good.key, stranger), "does not pass the check"),
        (draft, "is one of a draft; a target needs the URI"),
        (authority.role("orchestrator"), "is one of an orchestrator; a target needs the URI"),
        (authority.sign("old", uri, name, -2 * DAY, -DAY), "certificate has expired"),
        (authority.sign("new", uri, name, DAY, 2 * DAY), "not yet valid"),
        (authority.sign("bare", [], name), "of no role"),
    ]
    for paths, reason in cases:
        with pytest.raises(InvalidSettings, match=reason) as refused:
            paths.security("target")
        assert re.fullmatch(r"[^\n]+\.", str(refused.value))


@pytest.mark.parametrize("address", ["10.1.2.3:7001", "target-host:7001", "[2001:db8::1]:7001"])
def test_no_link_leaves_this_machine_in_plaintext_unless_it_is_said(address: str):
    for make in (RemoteVerifier, RemoteDrafter, StagePeer):
        with pytest.raises(InvalidSettings, match="--insecure"):
            make(address)
    RemoteVerifier(address, security=Security(is_insecure=True))


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
async def test_no_port_is_open_to_other_machines_in_plaintext_unless_it_is_said(listen: str):
    with pytest.raises(InvalidSettings, match="--insecure"):
        async with serving(listen, [DraftService(FakeDraft())]):
            pass


async def test_health_has_a_port_of_its_own_that_serves_nothing_else(authority: Authority):
    service = TargetService(FakeTarget())
    security = authority.role("target").security("target")
    async with (
        serving(LOOPBACK, [service], security=security, ports=SidePorts(health=LOOPBACK)) as server,
        grpc.aio.insecure_channel(server.health_address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "readiness", "liveness"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=LIMIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        # A watch would stay open for as long as whoever reaches this port likes.
        for path, is_streamed in (("/specsplit.v1.TargetService/Ping", False), ("/grpc.health.v1.Health/Watch", True)):
            assert await code_of(channel, path, False, is_streamed) is grpc.StatusCode.UNIMPLEMENTED
        server.tell_health(is_ready=False, is_live=True)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=LIMIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
