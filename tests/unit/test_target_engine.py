"""The target spends one forward a verify, its slots are those of a fresh prefill, and failures reach their callers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from specsplit.core.errors import InvalidRequest, NoFreeSlot, OutOfMemory, SlotBehind
from specsplit.core.types import ROOT, Proposal, SamplingParams, Verdict
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel, load_model
from specsplit.sampling import processors, sampler
from specsplit.target.engine import TargetEngine
from tests.contract.session_contract import Script
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.packs import assert_same_rows
from tests.support.runners import steered

MAX_SESSIONS = 3
LONG_PROMPT = 1200
_folders = TemporaryDirectory()


@cache
def load(family: str) -> LoadedModel:
    folder = Path(_folders.name) / family
    config = FAMILIES[family]()
    if family == "llama":
        config.max_position_embeddings = 2048
    if not folder.exists():
        save_model(folder, config, seed=3, with_tokenizer=False)
    return load_model(str(folder), role="target", threads=1, max_sessions=MAX_SESSIONS, node_limit=40, record=False)


def random_ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 258) for _ in range(count)]


@asynccontextmanager
async def engine(model: LoadedModel) -> AsyncIterator[TargetEngine]:
    verifier = TargetEngine(model)
    try:
        yield verifier
    finally:
        await verifier.aclose()


@dataclass
class Tree:
    """A tree to be verified; `path` are the nodes that spell the target's own next tokens."""

    token_ids: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])
    path: list[int] = field(default_factory=list[int])


def scattered_tree(truth: Sequence[int], rng: random.Random) -> Tree:
    """Hide some of the true tokens among wrong ones, so that the path is all but contiguous."""
    tree, wanted = Tree(), rng.randrange(len(truth))
    while len(tree.path) < wanted or rng.random() < 0.5:
        right = tree.path[-1] if tree.path else -1
        if len(tree.path) < wanted and rng.random() < 0.4:
            parent, token = right, truth[len(tree.path)]
            tree.path.append(len(tree.token_ids))
        else:
            parent = rng.randrange(-1, len(tree.token_ids))
            token = rng.randrange(3, 258)
            depth = tree.path.index(parent) + 1 if parent in tree.path else 0
            if (parent == -1 or depth) and token == truth[depth]:
                continue  # it would be right after all
        tree.token_ids.append(token)
        tree.parents.append(parent)
    return tree


class Conversation:
    """One session as an orchestrator leads it."""

    def __init__(self, verifier: TargetEngine, prompt: Sequence[int], **sampling: float) -> None:
        self.verifier, self.ids = verifier, list(prompt)
        self.script = Script(prompt)
        self.script.params = replace(self.script.params, sampling=SamplingParams(**sampling))  # type: ignore[arg-type]
        self.have, self.next_node = 0, 1

    async def verify(self, tree: Tree | None = None) -> Verdict:
        tree = tree or Tree()
        first = self.next_node
        proposal = Proposal(
            first_node=first,
            root_position=len(self.ids) - 1,
            token_ids=tuple(tree.token_ids),
            parents=tuple(ROOT if parent < 0 else first + parent for parent in tree.parents),
            log_probs=(-1.0,) * len(tree.token_ids),
        )
        turn = self.script.turn(self.ids, self.have, is_open=self.have > 0)
        verdict = await self.verifier.verify(turn, proposal)
        self.next_node += len(proposal)
        self.have = verdict.length
        self.ids.extend(verdict.token_ids)
        return verdict

    async def close(self) -> None:
        await self.verifier.close(self.script.session)


async def plain_tokens(verifier: TargetEngine, prompt: Sequence[int], count: int, **sampling: float) -> list[int]:
    talk = Conversation(verifier, prompt, **sampling)
    for _ in range(count):
        await talk.verify()
    await talk.close()
    return talk.ids[len(prompt) :]


SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {"temperature": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
async def test_the_rows_of_a_scattered_path_equal_those_of_a_fresh_prefill(family: str, sampling: str) -> None:
    model, rng, prompt = load(family), random.Random(f"{family} {sampling}"), random_ids(10, 1)
    async with engine(model) as verifier:
        truth = await plain_tokens(verifier, prompt, 60, **SAMPLING[sampling])
        talk = Conversation(verifier, prompt, **SAMPLING[sampling])
        await talk.verify()
        while len(talk.ids) < 50:
            done = len(talk.ids) - len(prompt)
            tree = scattered_tree(truth[done : done + 7], rng)
            first, before = talk.next_node, model.runner.num_forwards
            verdict = await talk.verify(tree)
            assert model.runner.num_forwards - before == verdict.timings.num_forwards == 1
            assert verdict.accepted == tuple(first + node for node in tree.path)
            assert talk.ids[len(prompt) :] == truth[: len(talk.ids) - len(prompt)]
            model.runner.forward([SequenceInput(1, 0, talk.ids[: verdict.length])])
            for block in (*model.runner.cache.keys, *model.runner.cache.values):
                assert_same_rows(block[0, :, : verdict.length], block[1, :, : verdict.length], model.runner)


async def test_a_long_prompt_in_chunks_has_the_logits_of_one_pass() -> None:
    model, runner = steered(load("llama"))
    prompt = random_ids(LONG_PROMPT, 2)
    async with engine(model) as verifier:
        verdict = await Conversation(verifier, prompt).verify()
    assert [len(entry.token_ids) for step in runner.steps for entry in step] == [512, 512, 176]
    assert (verdict.timings.num_forwards, verdict.timings.num_tokens) == (3, LONG_PROMPT)
    in_chunks = runner.logits[-1][0]
    at_once = load("llama").runner.forward([SequenceInput(1, 0, prompt)])[0]
    assert_same_rows(in_chunks, at_once, runner)
    for block in (*runner.cache.keys, *runner.cache.values):
        assert_same_rows(block[0, :, :LONG_PROMPT], block[1, :, :LONG_PROMPT], runner)


async def test_a_prompt_of_whole_chunks_needs_no_further_forward() -> None:
    async with engine(load("llama")) as verifier:
        verdict = await Conversation(verifier, random_ids(1024, 3)).verify()
    assert verdict.timings.num_forwards == 2


async def test_a_prefill_goes_on_beside_the_verifies_of_others() -> None:
    model, runner = steered(load("llama"))
    prompts = [random_ids(LONG_PROMPT, 4), random_ids(20, 5)]
    async with engine(model) as verifier:
        verifier.reuse_prefixes("off")
        truth = [await plain_tokens(verifier, prompt, 3) for prompt in prompts]
        long, short = (Conversation(verifier, prompt) for prompt in prompts)
        await short.verify()
        runner.steps.clear()
        with runner.held():
            prefill = asyncio.create_task(long.verify())
            await runner.wait_entered()
            beside = asyncio.create_task(short.verify(Tree(truth[1][1:2], [-1], [0])))
            await asyncio.sleep(0)
        prefilled, verified = await prefill, await beside
    assert [len(step) for step in runner.steps] == [1, 2, 1]
    assert (prefilled.timings.batch_size, verified.timings.batch_size) == (2, 2)
    assert verified.timings.step_rows == sum(len(entry.token_ids) for entry in runner.steps[1])
    assert (prefilled.timings.num_forwards, verified.timings.num_forwards) == (3, 1)
    assert (prefilled.token_ids, verified.token_ids) == (tuple(truth[0][:1]), tuple(truth[1][1:]))


async def test_a_closed_session_is_behind_until_all_is_sent_again() -> None:
    async with engine(load("llama")) as verifier:
        talk = Conversation(verifier, random_ids(10, 6))
        truth = await plain_tokens(verifier, talk.ids, 3)
        await talk.verify()
        await talk.close()
        with pytest.raises(SlotBehind) as raised:
            await talk.verify()
        assert raised.value.have == 0
        talk.have = 0
        await talk.verify()
        assert talk.ids[10:] == truth[:2]


async def test_no_session_is_taken_beyond_the_slots_and_none_suffers() -> None:
    async with engine(load("llama")) as verifier:
        prompts = [random_ids(10, seed) for seed in range(MAX_SESSIONS + 1)]
        truth = [await plain_tokens(verifier, prompt, 2) for prompt in prompts]
        talks = [Conversation(verifier, prompt) for prompt in prompts]
        for talk in talks[:-1]:
            await talk.verify()
        for _ in range(2):
            with pytest.raises(NoFreeSlot, match="All 3 sessions"):
                await talks[-1].verify()
        assert verifier.num_sessions == MAX_SESSIONS
        await talks[0].close()
        for talk in talks[1:]:
            while len(talk.ids) < 12:
                await talk.verify()
        assert [talk.ids[10:] for talk in talks[1:]] == truth[1:]


async def test_a_node_number_is_used_once_in_an_epoch() -> None:
    async with engine(load("llama")) as verifier:
        talk = Conversation(verifier, random_ids(6, 2))
        await talk.verify()
        await talk.verify(Tree(token_ids=[5, 6, 7], parents=[-1, -1, -1]))
        talk.next_node = 1
        await talk.verify()
        talk.next_node = 3
        with pytest.raises(InvalidRequest, match="Node 3 was verified before in this epoch; the next number is 4"):
            await talk.verify(Tree(token_ids=[5], parents=[-1]))


async def test_every_slot_is_free_after_closing() -> None:
    """Sessions end in every state, failed ones included; then as many begin as there are slots."""
    async with engine(load("llama")) as verifier:
        for _ in range(3):
            talks = [Conversation(verifier, random_ids(10, seed)) for seed in range(MAX_SESSIONS)]
            talks[0].script.params = replace(
                talks[0].script.params, sampling=SamplingParams(logit_bias=((100_000, 1.0),))
            )
            with pytest.raises(InvalidRequest, match="logit_bias"):
                await talks[0].verify()
            await asyncio.gather(*(talk.verify() for talk in talks[1:]))
            await asyncio.gather(*(talk.close() for talk in talks))
            assert verifier.num_sessions == 0


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (RuntimeError("the device broke"), RuntimeError, "device broke"),
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory, "smaller --context or fewer --nodes"),
        (MemoryError(), OutOfMemory, "smaller --context or fewer --nodes"),
    ],
    ids=["broken", "cuda-memory", "memory"],
)
async def test_a_failing_forward_ends_its_callers_and_nobody_else(
    error: Exception, kind: type[Exception], reason: str
) -> None:
    model, runner = steered(load("llama"))
    prompts = [random_ids(10 + seed, seed) for seed in range(MAX_SESSIONS)]
    async with engine(model) as verifier:
        truth = [await plain_tokens(verifier, prompt, 2) for prompt in prompts]
        first, *others = (Conversation(verifier, prompt) for prompt in prompts)
        with runner.held():
            before = asyncio.create_task(first.verify())
            await runner.wait_entered()
            failing = [asyncio.create_task(talk.verify()) for talk in others]
            await asyncio.sleep(0)
            # What runs out of memory is tried again for each of the two alone.
            sizes = [1, 2, 1, 1] if kind is OutOfMemory else [1, 2]
            runner.failures.update(dict.fromkeys(range(len(runner.steps), len(runner.steps) + len(sizes) - 1), error))
        await before
        for task in failing:
            with pytest.raises(kind, match=reason):
                await task
        assert [len(step) for step in runner.steps[-len(sizes) :]] == sizes
        for talk, prompt, tokens in zip((first, *others), prompts, truth, strict=True):
            while len(talk.ids) < len(prompt) + 2:
                await talk.verify()
            assert talk.ids[len(prompt) :] == tokens


@pytest.mark.parametrize("step", ["forward", "picks"])
async def test_the_round_that_failed_may_be_asked_again(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, runner = steered(load("llama"))
    error = torch.OutOfMemoryError("CUDA out of memory")

    def failing(logits: torch.Tensor) -> list[int]:
        raise error

    async with engine(model) as verifier:
        talk = Conversation(verifier, random_ids(10, 8))
        truth = await plain_tokens(verifier, talk.ids, 4)
        await talk.verify()
        tree = Tree(truth[1:3], [-1, 0], [0, 1])
        with monkeypatch.context() as patch:
            if step == "forward":
                runner.failures[len(runner.steps)] = error
            else:
                patch.setattr(sampler, "picked_ids", failing)
            with pytest.raises(OutOfMemory):
                await talk.verify(tree)
        talk.script.round -= 1
        verdict = await talk.verify(tree)
        assert list(verdict.token_ids) == truth[1:4]


async def test_a_verify_cancelled_within_its_forward_commits_nothing() -> None:
    model, runner = steered(load("llama"))
    async with engine(model) as verifier:
        talk = Conversation(verifier, random_ids(10, 9))
        truth = await plain_tokens(verifier, talk.ids, 4)
        await talk.verify()
        with runner.held():
            cancelled = asyncio.create_task(talk.verify(Tree(truth[1:3], [-1, 0], [0, 1])))
            await runner.wait_entered()
            cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        talk.next_node += 2
        verdict = await talk.verify(Tree([truth[1], 5], [-1, -1], [0]))
        assert list(verdict.token_ids) == truth[1:3]


async def test_penalties_look_only_at_what_a_round_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    common_length = processors.common_length

    def watched(ours: list[int], theirs: Sequence[int]) -> int:
        lengths.append(max(len(ours), len(theirs)))
        return common_length(ours, theirs)

    monkeypatch.setattr(processors, "common_length", watched)
    async with engine(load("llama")) as verifier:
        talk = Conversation(verifier, random_ids(60, 1), presence_penalty=0.5)
        for _ in range(6):
            await talk.verify(Tree([5, 9, 7], [-1, 0, 0]))
    assert lengths[0] == 60
    assert max(lengths[1:]) <= 4
