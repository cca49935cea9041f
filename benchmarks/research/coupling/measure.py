"""Measures where two models' logits meet: positions of the target's own text, and what each scheme does at one of them.

Uses the package's runner, noise, scores and picks as they serve. Legend: V vocabulary, S draws, k candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from benchmarks.research.coupling import rejection_schemes as peers
from benchmarks.research.coupling.rejection_schemes import Draws
from specsplit.core.errors import ContextExceeded, ModelDamaged, VocabularyMismatch
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel, load_model
from specsplit.sampling.noise import NoiseRows, gumbel_rows
from specsplit.sampling.pick import candidate_estimates, pick, scores

COUPLED, RATIO_TEST, SPECINFER = "coupled picks", "ratio test", "SpecInfer"
SEQUOIA, EXACT_MATCH, INDEPENDENT = "Sequoia", "exact match of top k", "independent tests"
CANDIDATES = (1, 2, 4)
TREES = (2, 4)
MIN_EXPECTED = 5
_TEXT_CHOICE, _DRAW_CHOICE = 1, 0
_NEGLIGIBLE = 1e-9
_BLOCK = 64
Scheme = tuple[str, int]
"""Its name and the number of candidates."""


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """Both models, in fp32."""

    target: LoadedModel
    draft: LoadedModel


def load_pair(target: str, draft: str, threads: int) -> LoadedPair:
    """Return the pair; torch computes with so many threads from here on.

    Raises:
        VocabularyMismatch: they cannot be a pair.
        ModelDamaged: the target has no tokenizer; and all that `load_model` raises.
    """
    pair = LoadedPair(  # unrecorded: loading is quicker, the logits are the same
        load_model(target, role="target", dtype="fp32", record=False),
        load_model(draft, role="draft", dtype="fp32", record=False, vocab="all"),
    )
    if pair.target.identity.vocab_hash != pair.draft.identity.vocab_hash:
        raise VocabularyMismatch(f"{target} and {draft} have different vocabularies.")
    if pair.target.tokenizer is None:
        raise ModelDamaged(f"{target} has no tokenizer, so it cannot read the prompts.")
    torch.set_num_threads(threads)
    return pair


@dataclass(frozen=True, slots=True)
class Position:
    """Logits of both models, fp32 [V], for the token at the absolute index `index` of one text."""

    index: int
    target: Tensor
    draft: Tensor


def positions(
    pair: LoadedPair, prompt_ids: Sequence[int], temperature: float, num_new_tokens: int, stride: int, seed: int
) -> Iterator[Position]:
    """Continue a prompt by the target's own picks, and yield every `stride`-th new token's logits of both models.

    Given that its path is accepted, a drafted node stands after the same tokens, so this is what every level meets. The
    text ends early at an end-of-sequence token.

    Raises:
        ContextExceeded: the text does not fit.
    """
    if len(prompt_ids) + num_new_tokens > min(pair.target.context, pair.draft.context):
        raise ContextExceeded(f"A prompt of {len(prompt_ids)} tokens leaves no room for {num_new_tokens} more.")
    target, draft = pair.target.runner, pair.draft.runner
    noise = NoiseRows(seed, _TEXT_CHOICE, target.vocab_size)
    token_ids, rows = list(prompt_ids), list[Tensor]()
    fresh, base = token_ids[:], 0
    while len(rows) < num_new_tokens and not (rows and token_ids[-1] in pair.target.eos_ids):
        logits = target.forward([SequenceInput(0, base, fresh)])[0]
        rows.append(logits[0])
        base += len(fresh)
        fresh = pick(scores(logits, temperature, noise.rows(base, 1))).tolist()
        token_ids += fresh
    drafted = draft.forward([SequenceInput(0, 0, token_ids[:base], num_logits=len(rows))])[0]
    for number in range(0, len(rows), stride):
        yield Position(len(prompt_ids) + number, rows[number], drafted[number])


def coupled_acceptance(target: Tensor, draft: Tensor) -> dict[int, float]:
    """Return the exact acceptance of coupled picks, by the number of candidates: 1 and 2.

    The noise is a race of exponentials E_j, won for the target by the least E_j / p_j. That least time is Exp(1)
    whichever token i wins, and the race then begins anew for the others. So, given that time m, token j ranks before i
    for the draft with probability 1 - exp(-m c_j), c_j = (q_j p_i / q_i - p_j)+. Integrated over m, none does with
    probability 1 / (1 + C), C being the sum of c, and only j with 1 / (1 + C - c_j) - 1 / (1 + C). Left out are tokens
    i that together have less than a billionth of the target's mass.
    """
    falling, tokens = target.sort(descending=True)
    winners = tokens[: int((falling.cumsum(0) < 1 - _NEGLIGIBLE).sum()) + 1]
    none, one = 0.0, 0.0
    for part in winners.split(_BLOCK):
        ratio = (target[part] / draft[part]).unsqueeze(-1)
        before = (draft * ratio - target).clamp_(min=0)
        # A token's c with itself is 0 up to rounding, which a large ratio would blow up.
        before.scatter_(-1, part.unsqueeze(-1), 0.0)
        rate = 1 + before.sum(-1, keepdim=True)
        none += (target[part] / rate.squeeze(-1)).sum().item()
        alone = before / (rate * (rate - before))
        one += (target[part] * alone.sum(-1)).sum().item()
    return {1: none, 2: none + one}


def law(logits: Tensor, temperature: float) -> Tensor:
    """Return the probabilities at a temperature, float64 [V]."""
    return torch.softmax(logits.double() / temperature, dim=-1)


def draws(position: Position, temperature: float, seeds: range, generator: Generator) -> dict[Scheme, Draws]:
    """Return what every scheme does at a position, one draw per seed; all get their candidates from one noise.

    The k best of the draft's scores have the law of samples without replacement, so Sequoia's rule tests the very
    candidates that coupled picks have. Its tests, and all that the other schemes need, are drawn by `generator`.
    """
    num_draws, most = len(seeds), max(CANDIDATES)
    target, draft = law(position.target, temperature), law(position.draft, temperature)
    vocab_size = len(target)
    noise = torch.cat([gumbel_rows(seed, _DRAW_CHOICE, position.index, 1, vocab_size) for seed in seeds])
    picks = pick(scores(position.target.expand(num_draws, -1), temperature, noise))
    offered, _ = candidate_estimates(scores(position.draft.expand(num_draws, -1), temperature, noise), most)
    candidates = torch.tensor(offered)
    replaced = peers.replaced_candidates(draft, num_draws, most, generator)
    found: dict[Scheme, Draws] = {}
    for k in CANDIDATES:
        accepted = (candidates[:, :k] == picks.unsqueeze(-1)).any(-1)
        found[COUPLED, k] = Draws(accepted.double(), picks)
        found[EXACT_MATCH, k] = peers.exact_match(target, draft, k, num_draws, generator)
    found[RATIO_TEST, 1] = peers.with_replacement(target, draft, replaced[:, :1], generator)
    for k in TREES:
        found[SPECINFER, k] = peers.with_replacement(target, draft, replaced[:, :k], generator)
        found[SEQUOIA, k] = peers.without_replacement(target, draft, candidates[:, :k], generator)
        if k == 2:
            exact = peers.acceptance_of_two_without_replacement(target, draft)
            found[SEQUOIA, k] = Draws(torch.full_like(found[SEQUOIA, k].acceptance, exact), found[SEQUOIA, k].emitted)
        found[INDEPENDENT, k] = peers.independent_tests(target, draft, replaced[:, :k], generator)
    return found


@dataclass(slots=True)
class ChiSquare:
    """Pearson's statistic of emitted tokens against the target's law, added up over positions.

    Tokens that expect fewer than five draws are one cell. Mean and variance are the exact ones of multinomial counts
    (Haldane 1937), since the usual 2 * degrees is too small a variance where cells are small.
    """

    statistic: float = 0.0
    degrees: int = 0
    variance: float = 0.0

    def add(self, emitted: Tensor, target: Tensor) -> None:
        """Count the tokens, int64 [S], that should follow `target`, float64 [V]."""
        num_draws = len(emitted)
        counts = torch.bincount(emitted, minlength=len(target)).double()
        large = target * num_draws >= MIN_EXPECTED
        cells, observed = [*target[large].tolist()], [*counts[large].tolist()]
        rest, observed_rest = target[~large].sum().item(), counts[~large].sum().item()
        if rest * num_draws < MIN_EXPECTED and cells:
            smallest = cells.index(min(cells))
            rest, observed_rest = rest + cells.pop(smallest), observed_rest + observed.pop(smallest)
        cells, observed = [*cells, rest], [*observed, observed_rest]
        num_cells = len(cells)
        if num_cells < 2:
            return
        self.statistic += sum(
            (count - num_draws * cell) ** 2 / (num_draws * cell) for count, cell in zip(observed, cells, strict=True)
        )
        self.degrees += num_cells - 1
        spread = sum(1 / cell for cell in cells) - num_cells**2 - 2 * num_cells + 2
        self.variance += 2 * (num_cells - 1) + spread / num_draws

    @property
    def z(self) -> float:
        """Standard deviations above its mean; 0 where nothing could be counted."""
        return (self.statistic - self.degrees) / math.sqrt(self.variance) if self.variance > 0 else 0.0

    @property
    def p_value(self) -> float:
        """Probability of such a statistic or a larger one if the law holds; many positions make it normal."""
        return math.erfc(self.z / math.sqrt(2)) / 2
