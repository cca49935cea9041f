"""Audits over real processes: a target of other weights under the same hash is found and named; honest ones stay."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import specsplit
from tests.support.gateways import GatewayProcess
from tests.support.metrics import samples_of, value
from tests.support.processes import WorkerProcess, run
from tests.support.stage_processes import altered_model, stage_process
from tests.support.tampered import tampered

TARGET = Path(specsplit.__file__).parent / "model" / "embedded" / "target"
PROMPTS = ("def add(a, b):\n", "class Stack:\n", "import os\n")
SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95})
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="module")
def honest(folder: Path) -> Generator[list[WorkerProcess]]:
    """Two targets, and a draft."""
    started = [_worker(folder / name, role) for name, role in (("one", "target"), ("two", "target"), ("d", "draft"))]
    yield started
    for each in started:
        each.close()


@pytest.fixture(scope="module")
def liar(folder: Path) -> Generator[WorkerProcess]:
    started = _worker(folder / "liar", "target", "--model", str(tampered(TARGET, folder / "tampered", "mlp")))
    yield started
    started.close()


def _worker(folder: Path, role: str, *arguments: str) -> WorkerProcess:
    folder.mkdir()
    return WorkerProcess(role, folder, "--sessions", "8", *arguments)


def generated(prompt: str, sampling: dict[str, Any], **options: Any) -> specsplit.Result:
    """Return a text of the Python API over these workers."""
    with specsplit.Pipeline(**options) as pipeline:
        return pipeline.generate(prompt, max_new_tokens=NUM_TOKENS, seed=7, ignore_eos=True, **sampling)


def read(url: str, prompt: str, sampling: dict[str, Any], *, stream: bool) -> str:
    """Return a text of the gateway."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "seed": 7, "ignore_eos": True, "stream": stream, **sampling}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()["choices"][0]["text"]
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def test_behind_a_gateway_a_liar_is_quarantined_and_named(
    honest: list[WorkerProcess], liar: WorkerProcess, folder: Path
) -> None:
    targets = [part for each in (liar, *honest[:2]) for part in ("--target", f"code={each.address}")]
    draft = ("--draft", f"code={honest[2].address}")
    expected = {
        (prompt, number): generated(prompt, sampling, target=honest[0].address, mode="plain").text
        for prompt in PROMPTS[:2]
        for number, sampling in enumerate(SAMPLINGS)
    }
    audited = GatewayProcess(folder, *targets, *draft, "--audit", "1")
    try:
        for (prompt, number), text in expected.items():
            assert read(audited.url, prompt, SAMPLINGS[number], stream=bool(number)) == text
        page = samples_of(httpx.get(f"{audited.url}/metrics").text)
        ready = httpx.get(f"{audited.url}/ready").json()
        log = audited.stderr
    finally:
        audited.close()
    targets = [liar.address, honest[0].address, honest[1].address]
    assert [value(page, "specsplit:quarantined", target=each) for each in targets] == [1, 0, 0]
    mismatches = [value(page, "specsplit:audit_mismatches_total", target=each) for each in targets]
    assert mismatches[0] >= 1
    assert mismatches[1:] == [0, 0]
    assert value(page, "specsplit:audited_tokens_total", model_name="code") >= len(expected) * NUM_TOKENS
    assert value(page, "specsplit:audits_missed_total", model_name="code") == 0
    assert ready["replicas"] == {"code": {"ready": 2, "of": 3}}
    lines = [line for line in log.splitlines() if "is quarantined" in line]
    assert len(lines) == 1
    assert f"the target at {liar.address} computes wrong results" in lines[0]


_MORE = [pytest.param(mode, each, marks=pytest.mark.slow) for mode in ("plain", "pingpong") for each in SAMPLINGS]


@pytest.mark.parametrize(("mode", "sampling"), [("overlap", SAMPLINGS[0]), ("stream", SAMPLINGS[1]), *_MORE])
def test_honest_targets_never_differ_and_a_text_says_so(
    honest: list[WorkerProcess], mode: str, sampling: dict[str, Any]
) -> None:
    target, auditor, draft = (each.address for each in honest)
    links = {"target": target, "mode": mode, **({"draft": draft} if mode != "plain" else {})}
    for prompt in PROMPTS:
        plain = generated(prompt, sampling, target=target, mode="plain")
        found = generated(prompt, {**sampling, "logprobs": 3}, **links, auditor=auditor, audit=1.0)
        assert found.token_ids == plain.token_ids
        assert len(found.logprobs) == NUM_TOKENS
        assert plain.audit is None
        assert found.audit is not None
        assert (found.audit.num_mismatches, found.audit.num_missed) == (0, 0)
        assert found.audit.num_tokens >= NUM_TOKENS
        assert found.audit.num_rounds == found.num_rounds + 1


def test_a_liar_alone_is_replaced_by_its_auditor(honest: list[WorkerProcess], liar: WorkerProcess) -> None:
    plain = generated(PROMPTS[0], {}, target=honest[0].address, mode="plain")
    links = ("--target", liar.address, "--auditor", honest[0].address, "--audit", "1")
    texts = "-n", str(NUM_TOKENS), "--ignore-eos", "--prompt", PROMPTS[0]
    code, out, _ = run("orchestrate", *links, *texts, "--json")
    assert code == 0
    assert json.loads(out)["token_ids"] == list(plain.token_ids)
    assert json.loads(out)["audit"]["num_mismatches"] == 1
    assert json.loads(out)["audit"]["wrong"] == [liar.address]
    assert {phase["reason"] for phase in json.loads(out)["degraded"]} == {"wrong"}
    code, _, summary = run("orchestrate", *links, *texts)
    assert code == 0
    assert "| audited" in summary
    assert f"rounds ({liar.address} wrong)" in summary


@pytest.mark.slow
@pytest.mark.parametrize("is_lying", [False, True])
def test_a_chain_is_audited_by_the_uncut_model(
    honest: list[WorkerProcess], folder: Path, is_lying: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = tampered(TARGET, folder / "chain", "layers.2.mlp") if is_lying else TARGET
    chain = _worker(folder / f"chain-{is_lying}", "target", "--model", str(model), "--local-stages", "2")
    try:
        plain = generated(PROMPTS[1], {}, target=honest[0].address, mode="plain")
        found = generated(PROMPTS[1], {}, target=chain.address, auditor=honest[0].address, audit=1.0)
    finally:
        chain.close()
    assert found.token_ids == plain.token_ids
    assert found.audit is not None
    assert found.audit.num_mismatches == int(is_lying)
    assert (f"the target at {chain.address} computes wrong results" in caplog.text) == is_lying


@pytest.mark.slow
def test_a_stage_that_lies_is_found_with_its_target_and_then_by_itself(
    honest: list[WorkerProcess], folder: Path
) -> None:
    """The audit leaves the target for one that is well; `stage-check` tells which of its stages it was."""
    # Where no hash of a stage looks; `tampered` is found when the stages are connected.
    lying = str(altered_model(folder / "altered", "model.layers.8.mlp.down_proj.weight", 0.25))
    slots = ("--sessions", "8")
    (own := folder / "stages").mkdir()
    stages = [stage_process(own, "0:6", *slots), stage_process(own, "6:12", *slots, "--model", lying)]
    addresses = ",".join(stage.address for stage in stages)
    cut = _worker(folder / "cut", "target", "--stages", addresses)
    try:
        plain = generated(PROMPTS[0], {}, target=honest[0].address, mode="plain")
        targets = [part for each in (cut, *honest[:2]) for part in ("--target", f"code={each.address}")]
        audited = GatewayProcess(own, *targets, "--audit", "1")
        try:
            text = read(audited.url, PROMPTS[0], {"temperature": 0.0}, stream=True)
            page, log = samples_of(httpx.get(f"{audited.url}/metrics").text), audited.stderr
        finally:
            audited.close()
        assert text == plain.text
        assert value(page, "specsplit:quarantined", target=cut.address) == 1
        assert f"the target at {cut.address} computes wrong results and is quarantined" in log
        assert cut.stop() == 0
        code, out, err = run("stage-check", "--stages", addresses, "--json")
    finally:
        for each in (cut, *stages):
            each.close()
    assert code == 1
    assert [stage["is_equal"] for stage in json.loads(out)["stages"]] == [True, False]
    assert f"Stage 1 at {stages[1].address} (layers 6:12) is the first that differs" in err


def test_nobody_to_audit_with_is_one_sentence(honest: list[WorkerProcess]) -> None:
    for arguments in (("--target", honest[0].address), ()):
        code, out, err = run("orchestrate", *arguments, "--audit", "0.5", "--prompt", "x")
        assert (code, out) == (2, "")
        assert err.strip().endswith(
            "There is nobody to audit with: --audit needs a second target of the same model, as a replica or named "
            "with --auditor."
        )
    code, _, err = run("serve", "--target", honest[0].address, "--audit", "1", "--http", "127.0.0.1:0")
    assert code == 2
    assert "nobody to audit with" in err
    code, _, err = run("orchestrate", "--target", honest[0].address, "--auditor", honest[1].address, "--prompt", "x")
    assert code == 2
    assert "add --audit RATE" in err


def test_an_auditor_of_another_model_is_refused(honest: list[WorkerProcess], folder: Path) -> None:
    other = _worker(folder / "other", "target", "--context", "128")
    try:
        code, _, err = run(
            *("orchestrate", "--target", honest[0].address, "--auditor", other.address, "--audit", "1"),
            *("--prompt", "x"),
        )
    finally:
        other.close()
    assert code == 1
    assert f"The target at {other.address} is no replica of the others" in err
