"""Records what the nodes of real rounds promised, and the outcome: listens to draft and orchestrator while they work.

Changes nothing that they do. Knows neither statistics nor files.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.research.calibration.merits import Node, Source
from benchmarks.research.calibration.settings import StudySettings
from benchmarks.workloads import Prompt
from specsplit.assembly.models import Models, load_models
from specsplit.assembly.opening import open_workers
from specsplit.core.sections import OrchestratorSettings
from specsplit.core.settings import DraftSettings, Settings, TargetSettings, override
from specsplit.core.types import SamplingParams, quantised_log_probs
from specsplit.draft import engine as draft_engine
from specsplit.engine import event_loop
from specsplit.orchestrator.request import Request
from specsplit.sampling.processors import process_logits
from specsplit.sampling.sampler import Sampler
from specsplit.speculation.acceptance import FIRST_AGREED, lookup_cells
from specsplit.speculation.statistics import SpeculationStats
from specsplit.speculation.token_tree import SpeculationTree, TokenTree

(_FIRST_LOOKUP,) = lookup_cells([1], [1], [0])
"""Cells are in this order: the draft's, those where lookup agrees, lookup's alone."""


def _sibling_ranks(nodes: TokenTree) -> list[int]:
    """Return each node's place among its siblings by estimate, 0 for the likeliest."""
    ranks, num_ranked = [0] * len(nodes.parents), dict[int, int]()
    for node in sorted(range(len(ranks)), key=nodes.log_probs.__getitem__, reverse=True):
        rank = ranks[node] = num_ranked.get(nodes.parents[node], 0)
        num_ranked[nodes.parents[node]] = rank + 1
    return ranks


@dataclass(frozen=True, slots=True)
class Word:
    """Estimates of a draft for a token, natural logarithms, and its place among the parent's children (0 the best)."""

    sent: float
    own: float
    """Log probability from its processed logits alone, without noise."""
    rank: int


Words = dict[tuple[int, ...], dict[int, Word]]
"""Keyed by all tokens before, then by token id."""


@contextmanager
def overheard(words: Words) -> Generator[None]:
    """Write down in `words` what the drafts of this process say, for the length of the block."""

    class Overheard(draft_engine.Grower):
        def _expand(self, sampler: Sampler, frontier: list[int], logits: Tensor, branching: int) -> None:
            num_before = len(self._tree)
            super()._expand(sampler, frontier, logits, branching)
            columns = self._model.runner.columns
            rows_of_all = logits if columns is None else columns.over_vocabulary(logits)
            shares = own_log_probs(rows_of_all, sampler.params.sampling)
            rows = {node: row for row, node in enumerate(frontier)}
            for node in range(num_before, len(self._tree)):
                self._write(node, shares[rows[self._tree.nodes.parents[node]]])

        def _write(self, node: int, shares: Tensor) -> None:
            tree, token_id = self._tree.nodes, self._tree.nodes.token_ids[node]
            said = words.setdefault((*self._session.ids, *tree.path_tokens(node)[:-1]), {})
            rank = sum(tree.parents[other] == tree.parents[node] for other in range(node))
            said[token_id] = Word(quantised_log_probs([tree.log_probs[node]])[0], shares[token_id].item(), rank)

    grower = draft_engine.Grower
    draft_engine.Grower = Overheard
    try:
        yield
    finally:
        draft_engine.Grower = grower


@torch.inference_mode()
def own_log_probs(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Return log softmax(processed logits / T), float64 [N, V]; greedy those of T = 1, there being no other law."""
    assert not sampling.has_penalties, "the study asks for none"
    return (process_logits(logits, sampling).double() / (sampling.temperature or 1.0)).log_softmax(-1)


class WatchedExperience(SpeculationStats):
    """Experience that also keeps every node decided by committed tokens, with the estimate it had until then.

    Sessions follow each other; each begins with `begin`.
    """

    def __init__(self, words: Words) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.num_late = 0
        """Nodes of proposals that came when their tokens were committed already; no tree ever held them."""
        self.words = words
        self._frozen: Sequence[float] | None = None
        self._text: list[int] = []
        self._prompt = -1

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Take note that a session begins, that of the next prompt."""
        self.words.clear()
        self._text = list(prompt_ids)
        self._prompt += 1

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take note of the tokens of a round, after its tree, if it had one, was observed."""
        self._text += token_ids

    def freeze(self) -> None:
        """From now on tell also what the table of this moment says of each node."""
        self._frozen = list(self.acceptance.log_probs)

    def observe_tree(self, tree: SpeculationTree, token_ids: Sequence[int]) -> None:
        """Keep what is decided, before anything is learned from it."""
        decided = tree.nodes.tested(token_ids)
        if tree.root_position == len(self._text) - 1:
            ranks, text = _sibling_ranks(tree.nodes), [*self._text, *token_ids]
            self.nodes += [self._node(tree, node, ranks[node], text, is_right=is_right) for node, is_right in decided]
        else:
            self.num_late += len(decided)
        super().observe_tree(tree, token_ids)

    def _node(self, tree: SpeculationTree, node: int, rank: int, text: list[int], *, is_right: bool) -> Node:
        position, cell = tree.root_position + tree.nodes.depths[node], tree.cells[node]
        word = self.words[tuple(text[:position])][tree.nodes.token_ids[node]] if cell < _FIRST_LOOKUP else None
        source: Source = "draft" if cell < FIRST_AGREED else "both" if cell < _FIRST_LOOKUP else "lookup"
        return Node(
            prompt=self._prompt,
            position=position,
            token_id=tree.nodes.token_ids[node],
            depth=tree.nodes.depths[node],
            rank=word.rank if word is not None else rank,
            source=source,
            is_right=is_right,
            calibrated=tree.nodes.log_probs[node],
            sent=word.sent if word is not None else None,
            own=word.own if word is not None else None,
            frozen=self._frozen[cell] if self._frozen is not None else None,
        )


@dataclass(frozen=True, slots=True)
class Found:
    """The nodes of one mode at one temperature."""

    mode: str
    temperature: float
    nodes: list[Node] = field(repr=False)
    num_late: int
    num_tokens: int
    """Committed."""


def load(settings: StudySettings) -> Models:
    """Load the pair.

    Raises:
        SpecSplitError: it cannot be loaded, or a mode is unknown.
    """
    return load_models(worker_settings(settings, settings.modes[0]))


def worker_settings(settings: StudySettings, mode: str) -> Settings:
    loading = {"dtype": "fp32", "threads": settings.threads}
    shape = settings.shape
    chosen = override(
        OrchestratorSettings(), mode=mode, nodes=shape.nodes, depth=shape.depth, branching=shape.branching
    )
    return Settings(
        target=TargetSettings.model_validate({"model": settings.target, **loading}),
        draft=DraftSettings.model_validate({"model": settings.draft, **loading}),
        orchestrator=chosen,
    )


def measure(
    settings: StudySettings,
    models: Models,
    prompts: Sequence[Prompt],
    mode: str,
    temperature: float,
    tick: Callable[[str], None],
) -> Found:
    """Continue every prompt, one after the other, with an orchestrator that knows nothing yet; return all nodes."""
    return event_loop.run(_measure(settings, models, prompts, mode, temperature, tick))


async def _measure(
    settings: StudySettings,
    models: Models,
    prompts: Sequence[Prompt],
    mode: str,
    temperature: float,
    tick: Callable[[str], None],
) -> Found:
    chosen, words = worker_settings(settings, mode), Words()
    sampling, experience, num_tokens = SamplingParams(temperature=temperature), WatchedExperience(words), 0
    with overheard(words):
        async with open_workers(chosen, models) as workers:
            orchestrator = workers.orchestrator(chosen.orchestrator)
            orchestrator.use_stats(experience, is_greedy=sampling.is_greedy)
            for number, prompt in enumerate(prompts):
                if number == settings.num_first_prompts:
                    experience.freeze()
                prompt_ids = tuple(workers.tokenizer.encode(prompt.text))
                experience.begin(prompt_ids)
                request = Request(
                    prompt_ids=prompt_ids,
                    max_new_tokens=settings.num_new_tokens,
                    sampling=sampling,
                    seed=settings.seed + number,
                )
                async with aclosing(orchestrator.stream(request)) as chunks:
                    async for chunk in chunks:  # one a round
                        experience.extend(chunk.token_ids)
                        num_tokens += len(chunk.token_ids)
                tick(f"{mode}, T = {temperature:g}, {prompt.id}")
    return Found(mode, temperature, experience.nodes, experience.num_late, num_tokens)
