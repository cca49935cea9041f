"""How other systems choose among drafted candidates for one token: ratio tests and exact match, to compare with.

Pure functions on probabilities; they know neither models nor our noise. Each gives, per draw, the probability that a
candidate is accepted and the token that is emitted. Legend: V vocabulary, S draws, k candidates; target and draft are
probabilities, float64 [V], the draft's all above 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """Outcome of one scheme at one position."""

    acceptance: Tensor
    """float64 [S]: the probability that one of the draw's candidates is accepted; exact where a scheme has that."""
    emitted: Tensor
    """int64 [S]."""


def variation(target: Tensor, draft: Tensor) -> float:
    """Return their total variation distance."""
    return (target - draft).abs().sum().item() / 2


def replaced_candidates(draft: Tensor, num_draws: int, k: int, generator: Generator) -> Tensor:
    """Return k independent draft samples per draw, int64 [S, k]."""
    return torch.multinomial(draft, num_draws * k, replacement=True, generator=generator).view(num_draws, k)


def with_replacement(target: Tensor, draft: Tensor, candidates: Tensor, generator: Generator) -> Draws:
    """Test independent draft samples one after the other, each against what the rejections before it left.

    With one candidate this is speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318), with
    more SpecInfer's multi-step rule (Miao et al., 2305.09781). What a rejection leaves does not depend on the token, so
    the acceptance is exact.
    """
    num_draws, k = candidates.shape
    emitted = torch.full((num_draws,), -1)
    rejected, remaining = 1.0, target
    for rank in range(k):
        tokens = candidates[:, rank]
        passes = torch.rand(num_draws, dtype=torch.float64, generator=generator) * draft[tokens] < remaining[tokens]
        emitted = torch.where((emitted < 0) & passes, tokens, emitted)
        rejected *= 1 - torch.minimum(remaining, draft).sum().item()
        remaining = _residual(remaining, draft)
    missing = emitted < 0
    emitted[missing] = _samples(remaining.expand(int(missing.sum()), -1), generator)
    return Draws(torch.full((num_draws,), 1 - rejected, dtype=torch.float64), emitted)


def without_replacement(target: Tensor, draft: Tensor, candidates: Tensor, generator: Generator) -> Draws:
    """Test draft samples taken without replacement, the draft being renormalised over what was not tested yet.

    Sequoia's rule (Chen et al., arXiv 2402.12374, algorithm 2). What is left depends on the tokens that were rejected,
    so the acceptance is exact given the draw's candidates.
    """
    num_draws, k = candidates.shape
    emitted = torch.full((num_draws,), -1)
    rejected = torch.ones(num_draws, dtype=torch.float64)
    remaining, untested = target.expand(num_draws, -1), draft.expand(num_draws, -1).clone()
    for rank in range(k):
        tokens = candidates[:, rank : rank + 1]
        proposed = untested / untested.sum(-1, keepdim=True)
        ratios = (remaining.gather(-1, tokens) / proposed.gather(-1, tokens)).squeeze(-1).clamp(max=1)
        passes = torch.rand(num_draws, dtype=torch.float64, generator=generator) < ratios
        emitted = torch.where((emitted < 0) & passes, tokens.squeeze(-1), emitted)
        rejected = rejected * (1 - ratios)
        remaining = _residual(remaining, proposed)
        untested.scatter_(-1, tokens, 0.0)
    missing = emitted < 0
    emitted[missing] = _samples(remaining[missing], generator)
    return Draws(1 - rejected, emitted)


def acceptance_of_two_without_replacement(target: Tensor, draft: Tensor) -> float:
    """Return the exact acceptance of `without_replacement` with two candidates.

    It sums over the first candidate s that is rejected, with probability (q_s - p_s)+: the second is then accepted with
    the sum over x of min(r_x, a q_x), r being the residual and a = 1 / (1 - q_s). Sorted by r / q, that takes two
    cumulative sums.
    """
    distance = variation(target, draft)
    if distance == 0:
        return 1.0
    left = _residual(target, draft)
    ratios, order = (left / draft).sort()
    r, q = left[order], draft[order]
    below = torch.cat([r.new_zeros(1), r.cumsum(0)])
    above = torch.cat([q.flip(0).cumsum(0).flip(0), q.new_zeros(1)])
    scale = 1 / (draft.sum() - draft).clamp(min=1e-300)
    split = torch.searchsorted(ratios, scale, right=True)
    second = below[split] + torch.where(above[split] > 0, scale * above[split], 0.0)
    return 1 - distance + ((draft - target).clamp(min=0) * second.clamp(max=1)).sum().item()


def exact_match(target: Tensor, draft: Tensor, k: int, num_draws: int, generator: Generator) -> Draws:
    """Let the target sample; accept if that is one of the draft's k likeliest tokens. The acceptance is exact."""
    likeliest = draft.topk(k).indices
    emitted = torch.multinomial(target, num_draws, replacement=True, generator=generator)
    return Draws(target[likeliest].sum().expand(num_draws), emitted)


def independent_tests(target: Tensor, draft: Tensor, candidates: Tensor, generator: Generator) -> Draws:
    """Test every candidate against the whole target and keep one that passes. Not lossless: shown for contrast.

    This is "keep the longest accepted path over all branches" on a tree of one level: several tries favour what the
    draft likes. The acceptance is exact.
    """
    num_draws, k = candidates.shape
    tries = torch.rand(num_draws, k, dtype=torch.float64, generator=generator)
    passes = tries * draft[candidates] < target[candidates]
    first = passes.to(torch.int8).argmax(-1, keepdim=True)
    emitted = candidates.gather(-1, first).squeeze(-1)
    missing = ~passes.any(-1)
    emitted[missing] = _samples(_residual(target, draft).expand(int(missing.sum()), -1), generator)
    acceptance = 1 - variation(target, draft) ** k
    return Draws(torch.full((num_draws,), acceptance, dtype=torch.float64), emitted)


def independent_tests_law(target: Tensor, draft: Tensor, k: int) -> Tensor:
    """Return the exact law, float64 [V], of what `independent_tests` emits."""
    shared, distance = torch.minimum(target, draft), variation(target, draft)
    if distance == 0:
        return target
    return shared / shared.sum() * (1 - distance**k) + _residual(target, draft) * distance**k


def _residual(target: Tensor, draft: Tensor) -> Tensor:
    """Return what the target has more than the draft, normalised; the target itself where they are equal."""
    excess = (target - draft).clamp(min=0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / total, target)


def _samples(probabilities: Tensor, generator: Generator) -> Tensor:
    """Return one token per row."""
    if len(probabilities) == 0:
        return torch.empty(0, dtype=torch.int64)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
