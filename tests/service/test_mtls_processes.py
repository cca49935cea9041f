"""One process each with certificates of `specsplit certs dev`: the same text, no byte of it readable on the way."""

from __future__ import annotations

import asyncio
import json
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specsplit.rpc.auth import ROLES, LinkRole
from specsplit.rpc.certificate import CertificateFiles, read_certificate
from tests.support.processes import LIMIT_S, WorkerProcess, run
from tests.support.recording_proxy import RecordingProxy, recorded

PROMPT = "def marker_of_a_secret(a, b):"
ASKED = ("--prompt", PROMPT, "--max-new-tokens", "24", "--json", "--temperature", "0.8", "--seed", "5")
PATIENT = ("--draft-patience", str(LIMIT_S))


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "dev"
    code, out, err = run("certs", "dev", str(folder), "--host", "target-host", "--host", "10.0.0.7")
    assert (code, out.startswith("specsplit target --tls-cert ")) == (0, True), err
    return folder


def options(certs: Path, role: str) -> tuple[str, ...]:
    return "--tls-cert", f"{certs}/{role}.pem", "--tls-key", f"{certs}/{role}.key", "--tls-ca", f"{certs}/ca.pem"


@contextmanager
def started(folder: Path, certs: Path, *roles: tuple[str, ...]) -> Iterator[list[WorkerProcess]]:
    with ExitStack() as stack:
        workers: list[WorkerProcess] = []
        for number, (role, *arguments) in enumerate(roles):
            (own := folder / f"{role}-{number}").mkdir()
            worker = WorkerProcess(role, own, *options(certs, role), *arguments)
            stack.callback(worker.close)
            workers.append(worker)
        yield workers


def check_nothing_is_readable(proxy: RecordingProxy) -> None:
    assert len(proxy.seen) > 1000
    for word in (b"specsplit.v1", b"marker", b"VerifyDrafts", b"SSPK", b"Forward", b"grpc", b"PRI * HTTP/2"):
        assert word not in proxy.seen


async def test_draft_and_target_give_the_text_of_plain_decoding_over_mtls(certs: Path, tmp_path: Path):
    code, out, err = run("orchestrate", *ASKED, "--mode", "plain")
    assert code == 0, err
    plain = json.loads(out)
    with started(tmp_path, certs, ("target", "--health", "127.0.0.1:0"), ("draft",)) as (target, draft):
        async with recorded(target) as to_target, recorded(draft) as to_draft:
            addresses = ("--target", to_target.address, "--draft", to_draft.address)
            asked = ("orchestrate", *ASKED, *addresses, *options(certs, "orchestrator"), *PATIENT, "--mode", "overlap")
            code, out, err = await asyncio.to_thread(run, *asked)
            assert code == 0, err
            answer = json.loads(out)
            assert answer["text"] == plain["text"]
            assert answer["degraded"] == []
            assert answer["speculative_decoding"]["num_draft_tokens"] > 0
            for proxy in (to_target, to_draft):
                check_nothing_is_readable(proxy)
        # A probe shows no certificate, and has a port of its own.
        async with grpc.aio.insecure_channel(target.ready["health"]) as channel:
            asking = health_pb2.HealthCheckRequest(service="readiness")
            answer = await health_pb2_grpc.HealthStub(channel).Check(asking, timeout=LIMIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        code, _, err = run("orchestrate", *ASKED, "--target", target.address, "--retry", "0")
        assert (code, "asks for a certificate" in err) == (1, True)
        code, _, err = run(
            "orchestrate", *ASKED, "--target", draft.address, "--retry", "0", *options(certs, "orchestrator")
        )
        assert (code, "its certificate is not one of a target" in err) == (1, True)
        code, out, _ = run("doctor", "--target", target.address, *options(certs, "orchestrator"), "--json")
        checks = {check["name"]: check for check in json.loads(out)["checks"]}
        assert checks["target"]["is_ok"]
        assert "spiffe://specsplit/orchestrator" in checks["certificate"]["detail"]


async def test_a_chain_of_two_stages_gives_the_text_of_plain_decoding_over_mtls(certs: Path, tmp_path: Path):
    code, out, err = run("orchestrate", *ASKED, "--mode", "plain")
    assert code == 0, err
    plain = json.loads(out)
    stages = [("stage", "--layers", layers, "--context", "256") for layers in ("0:4", "4:12")]

    async def text_over(target: WorkerProcess) -> str:
        address = await asyncio.to_thread(lambda: target.address)
        asked = ("orchestrate", *ASKED, "--target", address, *options(certs, "orchestrator"))
        code, out, err = await asyncio.to_thread(run, *asked)
        assert code == 0, err
        return json.loads(out)["text"]

    with started(tmp_path, certs, *stages) as (first, second):
        async with recorded(first) as to_first, recorded(second) as to_second:
            chain = f"{to_first.address},{to_second.address}"
            with started(tmp_path, certs, ("target", "--stages", chain, "--context", "256")) as (target,):
                assert await text_over(target) == plain["text"]
            check = ("stage-check", "--stages", chain, "--context", "256", *options(certs, "target"), "--json")
            code, out, err = await asyncio.to_thread(run, *check)
            assert (code, json.loads(out)["ok"]) == (0, True), err
            # The target may hold the first layers itself: then it stands in front of the second stage.
            (tmp_path / "own").mkdir()
            own = ("target", "--layers", "0:4", "--stages", to_second.address, "--context", "256")
            with started(tmp_path / "own", certs, own) as (target,):
                assert await text_over(target) == plain["text"]
        # The second proxy carries what the first stage sends on, too.
        for proxy in (to_first, to_second):
            check_nothing_is_readable(proxy)


@pytest.mark.parametrize("role", ROLES)
def test_certificates_for_development_are_private_and_name_their_role(role: LinkRole, certs: Path):
    files = CertificateFiles(certs / f"{role}.pem", certs / f"{role}.key", certs / "ca.pem")
    for path in files.all:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(certs.stat().st_mode) & 0o077 == 0
    found = read_certificate(files)
    assert found.proves(role)
    assert {"localhost", "target-host"} <= set(found.dns_names)
    assert {"127.0.0.1", "10.0.0.7"} <= set(found.addresses)
    assert {path.name for path in certs.iterdir()} == {"ca.pem", *(f"{r}.{e}" for r in ROLES for e in ("pem", "key"))}


def test_certificates_are_not_written_over_anything(certs: Path, tmp_path: Path):
    before = {path: path.read_bytes() for path in certs.iterdir()}
    code, _, err = run("certs", "dev", str(certs))
    assert (code, err.count("\n")) == (2, 1)
    assert "is not empty" in err
    assert {path: path.read_bytes() for path in certs.iterdir()} == before
    (tmp_path / "file").write_text("")
    assert run("certs", "dev", str(tmp_path / "file"))[0] == 2
    code, _, err = run("certs", "dev", str(tmp_path / "new"), "--host", "host:7001")
    assert (code, "write it without port" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("target", "--listen", "0.0.0.0:0"), "can be reached from other machines"),
        (("draft", "--listen", "[::]:0"), "can be reached from other machines"),
        (("stage", "--layers", "0:2", "--listen", "0.0.0.0:0"), "can be reached from other machines"),
        (("target", "--stages", "host-a:7101,host-b:7101"), "The link to host-a:7101 leaves this machine"),
        (("stage-check", "--stages", "host-a:7101"), "The link to host-a:7101 leaves this machine"),
        (
            ("orchestrate", "--target", "host:7001", "--prompt", "a", "--mode", "plain"),
            "The link to host:7001 leaves this machine",
        ),
        (("serve", "--http", "127.0.0.1:0", "--target", "host:7001"), "The link to host:7001 leaves this machine"),
        (("target", "--tls-cert", "a.pem"), "Name all of --tls-cert, --tls-key and --tls-ca"),
    ],
)
def test_plaintext_off_loopback_is_refused_at_the_start_with_the_remedy(arguments: tuple[str, ...], reason: str):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert reason in err
    assert err.count("\n") == 1
    assert "--tls-cert" in err


def test_certificates_and_insecure_and_another_role_are_refused(certs: Path, tmp_path: Path):
    code, _, err = run("target", *options(certs, "target"), "--insecure")
    assert (code, "--insecure is for links without certificates, and --tls-cert names one" in err) == (2, True)
    code, _, err = run("target", *options(certs, "draft"))
    assert (code, "is one of a draft; a target needs the URI spiffe://specsplit/target" in err) == (2, True)
    variables = {f"SPECSPLIT_TARGET_TLS_{part.upper()}": f"{tmp_path}/{part}" for part in ("cert", "key", "ca")}
    for part, file in (("cert", "stage.pem"), ("key", "stage.key"), ("ca", "ca.pem")):
        shutil.copyfile(certs / file, tmp_path / part)
    code, _, err = run("target", **variables)
    assert (code, "is one of a stage" in err) == (2, True)


@pytest.mark.slow
def test_workers_that_the_gateway_starts_itself_stay_on_loopback(certs: Path, tmp_path: Path):
    variables = {f"SPECSPLIT_TARGET_TLS_{part.upper()}": f"{certs}/none" for part in ("cert", "key", "ca")}
    frame = 'MODEL_INFO {"model": "embedded", "data": {}, "stream_id": 1}\n'
    code, out, err = run("lmtp", "--stdio", "--mode", "plain", stdin=frame.encode(), **variables)
    assert (code, "model_info" in out) == (0, True), err
