"""`specsplit stage-check` over stages that are served here, and the supervision of local stages by itself."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from specsplit.cli.main import main
from specsplit.core.errors import InvalidSettings
from specsplit.core.sections import StageSettings
from specsplit.stages.local import local_stages
from specsplit.stages.wire.peer import StagePeer
from tests.support.stage_processes import EMBEDDED_TARGET, altered_model, eventually, is_gone, served_stages

Capture = pytest.CaptureFixture[str]
ALTERED = "model.layers.4.mlp.down_proj.weight"


def _stage(layers: str, model: str = "embedded", **settings: object) -> StageSettings:
    return StageSettings.model_validate({"model": model, "layers": layers, "context": 256, "threads": 1, **settings})


def _check(capfd: Capture, addresses: list[str], *arguments: str) -> tuple[int, dict[str, object], str]:
    code = main(["stage-check", "--stages", ",".join(addresses), "--context", "256", "--json", *arguments])
    out, err = capfd.readouterr()
    return code, json.loads(out) if out else {}, err


@pytest.mark.parametrize("ends", ["stages", "coordinator"])
def test_a_chain_is_equal_to_one_process_at_every_boundary(ends: str, capfd: Capture):
    with served_stages(*(_stage(layers, ends=ends) for layers in ("0:1", "1:4", "4:12"))) as addresses:
        code, report, err = _check(capfd, addresses, "--ends", ends)
        assert (code, err, report["ok"]) == (0, "", True)
        found = report["stages"]
        assert isinstance(found, list)
        assert [(stage["stage"], stage["address"], stage["layers"]) for stage in found] == [
            (0, addresses[0], "0:1"), (1, addresses[1], "1:4"), (2, addresses[2], "4:12")
        ]  # fmt: skip
        assert all(stage["max_deviation"] <= 1e-5 and stage["time_ms"] > 0 for stage in found)
        assert [stage["num_other_picks"] for stage in found] == [None, None, 0]


def test_the_first_stage_that_differs_is_named_at_an_equal_hash(tmp_path: Path, capfd: Capture):
    other = str(altered_model(tmp_path / "other", ALTERED, 0.25))  # where no hash looks
    same = str(EMBEDDED_TARGET)
    with served_stages(_stage("0:2"), _stage("2:5", other), _stage("5:12")) as addresses:
        assert main(["stage-check", "--stages", ",".join(addresses), "--context", "256", "--model", same]) == 1
        out, err = capfd.readouterr()
    assert err.startswith(f"Stage 1 at {addresses[1]} (layers 2:5) is the first that differs from the model in one ")
    table = [line.split() for line in out.splitlines()]
    assert table[0][:3] == ["stage", "address", "layers"]
    assert [(row[1], row[2], row[-1]) for row in table[1:]] == [
        (addresses[0], "0:2", "equal"), (addresses[1], "2:5", "differs"), (addresses[2], "5:12", "differs")
    ]  # fmt: skip


def test_weights_of_another_hash_are_refused_before_any_packet(tmp_path: Path, capfd: Capture):
    other = str(altered_model(tmp_path / "other", ALTERED, 0.0))
    with served_stages(_stage("0:2"), _stage("2:12", other)) as addresses:
        code, report, err = _check(capfd, addresses)
    assert (code, report) == (1, {})
    assert err.startswith(f"Error: The stage at {addresses[1]} has other weights for layers 2:12 ")


def test_a_stage_that_is_not_there_is_one_sentence(capfd: Capture):
    code, report, err = _check(capfd, ["127.0.0.1:9"])
    assert (code, report) == (1, {})
    assert err.startswith("Error: The stage at 127.0.0.1:9 cannot be reached")
    assert err.count("\n") == 1


async def test_a_local_stage_that_dies_is_started_again_at_its_address():
    told: list[str] = []

    def pids() -> list[int]:
        return [int(pid) for line in told for pid in re.findall(r" serves at \S+, process (\d+)\.$", line)]

    arguments = ("--model", "embedded", "--context", "256", "--threads", "1")
    async with local_stages(["2:5"], arguments, told.append) as addresses:
        os.kill(pids()[0], signal.SIGKILL)
        await eventually(lambda: len(pids()) == 2)
        peer = StagePeer(addresses[0])
        identity = (await peer.ping()).identity
        await peer.aclose()
        assert (identity.layers, identity.context) == ("2:5", 256)
    assert all(map(is_gone, pids()))


@pytest.mark.slow
async def test_a_local_stage_that_cannot_start_says_why_in_its_own_words():
    with pytest.raises(InvalidSettings) as caught:
        async with local_stages(["5:15"], ("--model", "embedded")):
            pass
    assert str(caught.value).startswith("Stage 0 (layers 5:15) ended before it served: embedded has 12 layers")
