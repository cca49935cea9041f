"""Coupled picks emit the target's law on branching trees, and accept as often as the coupling's theory says.

Models here are first-order Markov tables: row 0 holds the logits at the root, row 1 + t those after token t.
Legend: S samples, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specsplit.core.types import SamplingParams
from specsplit.sampling.noise import NoiseRows, gumbel_rows
from specsplit.sampling.pick import candidate_estimates, pick, scores
from specsplit.sampling.processors import PenaltyContext, TokenCounts, bias_row, process_logits
from specsplit.sampling.verify import walk

V = 6
S = 4000
CASES = [
    (SamplingParams(temperature=1), 1),
    (SamplingParams(temperature=1), 2),
    (SamplingParams(temperature=1), 3),
    (SamplingParams(temperature=0.6, top_p=0.9), 2),
    (SamplingParams(temperature=1.5, top_p=0.8), 3),
    (SamplingParams(temperature=0.8, top_k=4, min_p=0.05, logit_bias=((1, 1.0), (4, -0.5))), 2),
]


def table(seed: int, vocab: int = V) -> Tensor:
    return torch.randn(1 + vocab, vocab, generator=torch.Generator().manual_seed(seed)) * 1.5


def noise_by_position(seed: int) -> Tensor:
    """[S, 3, V]: one request, S places in its text."""
    return gumbel_rows(seed, 0, 0, 3 * S, V).view(S, 3, V)


def noise_by_seed(first_seed: int) -> Tensor:
    """[S, 3, V]: S requests with neighbouring seeds at the same place."""
    return torch.stack([gumbel_rows((first_seed + sample) % (1 << 64), 0, 40, 3, V) for sample in range(S)])


def processed(model: Tensor, params: SamplingParams) -> Tensor:
    return process_logits(model, params, bias=bias_row(params, V))


def candidates(scored: Tensor, branching: int) -> Tensor:
    """Return the children that a draft offers below each row [N, branching], -1 where its processors left fewer."""
    found, _ = candidate_estimates(scored, branching)
    return torch.tensor([[*row, *[-1] * (branching - len(row))] for row in found])


def grow(draft: Tensor, noise: Tensor, temperature: float, branching: int) -> tuple[list[int], list[list[int]]]:
    """Return the parents of a two-level tree, the same for all samples, and each sample's token ids.

    A child that the draft's processors cut becomes token -1, which no pick can match.
    """
    level = scores(draft[:1].expand(S, V), temperature, noise[:, 0])
    children = candidates(level, branching)
    rows = draft[1 + children.flatten()]
    level = scores(rows, temperature, noise[:, 1].repeat_interleave(branching, dim=0))
    grandchildren = candidates(level, branching).view(S, branching * branching)
    parents = [-1] * branching + [child for child in range(branching) for _ in range(branching)]
    return parents, torch.cat([children, grandchildren], dim=-1).tolist()


def target_picks(target: Tensor, parents: list[int], token_ids: list[list[int]], noise: Tensor, t: float) -> Tensor:
    """Return the picks [S, 1 + nodes] at the root and at every node."""
    depths = torch.tensor([0] + [1 if parent < 0 else 2 for parent in parents])
    contexts = torch.cat([torch.zeros(S, 1, dtype=torch.int64), 1 + torch.tensor(token_ids)], dim=-1)
    level = scores(target[contexts].flatten(0, 1), t, noise[:, depths].flatten(0, 1))
    return pick(level).view(S, -1)


def plain_text(target: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """Return three tokens per sample, [S, 3], chosen one at a time."""
    context, text = torch.zeros(S, dtype=torch.int64), list[Tensor]()
    for step in range(3):
        text.append(pick(scores(target[context], temperature, noise[:, step])))
        context = 1 + text[-1]
    return torch.stack(text, dim=-1)


def emit(target: Tensor, draft: Tensor, noise: Tensor, temperature: float, branching: int) -> list[list[int]]:
    """Return what one round emits in each sample: one to three tokens."""
    parents, token_ids = grow(draft, noise, temperature, branching)
    picks = target_picks(target, parents, token_ids, noise, temperature).tolist()
    return [walk(parents, tokens, row)[1] for tokens, row in zip(token_ids, picks, strict=True)]


def p_value(counts: Tensor, law: Tensor) -> float:
    """Return the chi-square test's p; cells that expect fewer than five samples are pooled."""
    expected = law.double().flatten() * counts.sum()
    counts = counts.double().flatten()
    assert counts[expected == 0].sum() == 0, "a token was emitted that the processors had cut"
    rare = expected < 5
    observed, rest = torch.cat([counts[~rare], counts[rare].sum().view(1)]), expected[rare].sum().view(1)
    expected = torch.cat([expected[~rare], rest])
    if rest < 5:  # too little even together: into the neighbour's cell
        observed = torch.cat([observed[:-2], observed[-2:].sum().view(1)])
        expected = torch.cat([expected[:-2], expected[-2:].sum().view(1)])
    statistic = ((observed - expected) ** 2 / expected).sum()
    return torch.special.gammaincc((torch.tensor(len(expected)).double() - 1) / 2, statistic / 2).item()


def pair_law(target: Tensor, temperature: float) -> Tensor:
    """Return the law [V, V] of the first two tokens."""
    law = torch.softmax(target.double() / temperature, dim=-1)
    return law[0].unsqueeze(1) * law[1:]


def first_pairs(emitted: list[list[int]], target: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """Count the first two tokens, [V, V]; where a round emitted one, the next round's root pick is the second."""
    follow_up = pick(scores(target[[1 + tokens[0] for tokens in emitted]], temperature, noise[:, 1])).tolist()
    counts = torch.zeros(V, V)
    for tokens, second in zip(emitted, follow_up, strict=True):
        counts[tokens[0], tokens[1] if len(tokens) > 1 else second] += 1
    return counts


@pytest.mark.parametrize(("params", "branching"), CASES, ids=str)
@pytest.mark.parametrize("seed", [0, 7, (1 << 64) - 1])
def test_emitted_tokens_follow_the_targets_law(params: SamplingParams, branching: int, seed: int) -> None:
    target, draft = processed(table(seed % 97), params), processed(table(seed % 97 + 1), params)
    noise = noise_by_position(seed)
    emitted = emit(target, draft, noise, params.temperature, branching)
    assert {len(tokens) for tokens in emitted} == {1, 2, 3}
    counts = first_pairs(emitted, target, noise, params.temperature)
    assert p_value(counts, pair_law(target, params.temperature)) > 1e-4
    # The test can tell: the draft's law does not fit.
    if params.top_p == 1 and params.top_k == 0:
        assert p_value(counts, pair_law(draft, params.temperature)) < 1e-20


@pytest.mark.parametrize("first_seed", [0, (1 << 64) - S // 2])
def test_the_law_holds_over_neighbouring_seeds(first_seed: int) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95)
    target, draft = processed(table(5), params), processed(table(6), params)
    noise = noise_by_seed(first_seed)
    counts = first_pairs(emit(target, draft, noise, 0.9, 2), target, noise, 0.9)
    assert p_value(counts, pair_law(target, 0.9)) > 1e-4


@pytest.mark.parametrize(("params", "branching"), CASES, ids=str)
def test_accepted_tokens_keep_the_law_given_acceptance_or_not(params: SamplingParams, branching: int) -> None:
    """Every emitted token, accepted or bonus, is the one that plain decoding chooses there."""
    target = processed(table(11), params)
    noise = noise_by_position(3)
    plain = plain_text(target, noise, params.temperature).tolist()
    for draft_seed in (11, 12, 13):
        draft = processed(table(draft_seed), params)
        for tokens, expected in zip(emit(target, draft, noise, params.temperature, branching), plain, strict=True):
            assert tokens == expected[: len(tokens)]


def test_candidates_are_sampled_without_replacement() -> None:
    logits = table(21)[0]
    ids = candidates(scores(logits.expand(S, V), 1.0, noise_by_position(21)[:, 0]), 2)
    counts = torch.zeros(V, V)
    counts.index_put_((ids[:, 0], ids[:, 1]), torch.ones(S), accumulate=True)
    law = torch.softmax(logits.double(), dim=-1)
    pairs = law.unsqueeze(1) * law / (1 - law).unsqueeze(1)
    assert p_value(counts, pairs.fill_diagonal_(0)) > 1e-4


@pytest.mark.parametrize("model_seed", range(8))
def test_acceptance_lies_within_the_couplings_bounds(model_seed: int) -> None:
    """Daliri, Musco, Suresh (arXiv 2408.07978): (1 - TV) / (1 + TV) <= P(accept) <= 1 - TV."""
    samples, vocab = 20_000, 24
    noise = gumbel_rows(model_seed, 0, 0, samples, vocab)
    generator = torch.Generator().manual_seed(model_seed)
    target = torch.randn(1, vocab, generator=generator) * 2
    draft = target + torch.randn(1, vocab, generator=generator) * (0.2 + 0.3 * model_seed)
    variation = (torch.softmax(target, -1) - torch.softmax(draft, -1)).abs().sum().item() / 2
    of_target, of_draft = (pick(scores(model.expand_as(noise), 1.0, noise)) for model in (target, draft))
    accepted = of_target == of_draft
    acceptance = accepted.double().mean().item()
    four_sigma = 4 * (0.25 / samples) ** 0.5
    assert (1 - variation) / (1 + variation) - four_sigma <= acceptance <= 1 - variation + four_sigma


def chain_context(counts: TokenCounts, path: list[int], params: SamplingParams) -> PenaltyContext | None:
    return counts.rows([path]) if params.has_penalties else None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.05),
        SamplingParams(temperature=0.6, top_p=0.9),
        SamplingParams(temperature=1),
        SamplingParams(temperature=1, top_k=20, min_p=0.02, logit_bias=((3, 2.0),)),
        SamplingParams(temperature=20),
        SamplingParams(temperature=0.8, presence_penalty=1, frequency_penalty=0.5, repetition_penalty=1.3),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_that_is_the_target_is_always_accepted(params: SamplingParams, dtype: torch.dtype) -> None:
    """The draft grows a chain level by level, the target scores it at once; 40 rounds of 6 nodes."""
    vocab, depth = 200, 6
    model, bias = table(31, vocab).to(dtype), bias_row(params, vocab)
    draft_noise, target_noise = NoiseRows(99, 1, vocab), NoiseRows(99, 1, vocab)
    committed, counts = [5, 6, 7], TokenCounts(vocab, 3)
    for _ in range(40):
        position, chain, root_row = len(committed), list[int](), 1 + committed[-1]
        counts.sync(committed)
        for level in range(depth):
            logits = model[1 + chain[-1] if chain else root_row].unsqueeze(0)
            rows = process_logits(logits, params, chain_context(counts, chain, params), bias)
            level_noise = draft_noise.rows(position + level, 1)
            ids = candidates(scores(rows, params.temperature, level_noise), 2)
            chain.append(int(ids[0, 0]))
        paths = [chain[:length] for length in range(depth + 1)]
        context = counts.rows(paths) if params.has_penalties else None
        rows = process_logits(model[[root_row, *(1 + token for token in chain)]], params, context, bias)
        noise = target_noise.for_depths(position, range(depth + 1))
        picks = pick(scores(rows, params.temperature, noise)).tolist()
        accepted, emitted = walk(range(-1, depth - 1), chain, picks)
        assert len(accepted) == depth
        committed += emitted
