"""Acceptance and text of the pair through the real engines: prompts in, counts out.

Uses the package as any caller does. Knows no training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.metrics import Acceptance, acceptance
from benchmarks.research.train_pair.corpus import Document
from benchmarks.research.train_pair.filters import without_header
from benchmarks.research.train_pair.text_checks import has_coherent_indentation, has_matching_brackets, is_loop
from benchmarks.workloads import Prompt
from specsplit.assembly.local import local_workers
from specsplit.assembly.models import Models, load_models
from specsplit.assembly.workers import Workers
from specsplit.core.settings import DraftSettings, Settings, TargetSettings
from specsplit.core.types import SamplingParams
from specsplit.engine import event_loop
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result
from specsplit.speculation.options import Speculation

DEPTHS = tuple(range(1, 9))
TEMPERATURES = (0.0, 0.6, 1.0)
BRANCHINGS = (1, 2, 4)
CHAIN_OF_4 = (4, 1)
NUM_NEW_TOKENS = 96
NUM_TABLE_TOKENS = 64
NUM_CHECKED_TOKENS = 60
PROMPT_LINES = 24
Tell = Callable[[str], None]


def held_out_prompts(documents: Iterable[Document], count: int) -> list[Prompt]:
    """Return beginnings of the first held-out files that are long enough, without header, cut at the end of a line."""
    found: list[Prompt] = []
    for document in documents:
        lines = without_header(document.text).splitlines()
        if document.held_out and len(lines) > 3 * PROMPT_LINES and len(found) < count:
            text = "\n".join(lines[:PROMPT_LINES]).rstrip()
            found.append(Prompt(f"{document.package}/{document.path}", text))
    return found


def load_pair(target: Path, draft: Path, threads: int) -> tuple[Models, float]:
    """Return the pair in fp32, and the seconds that loading took (the libraries being loaded already)."""
    start_s = time.perf_counter()
    models = load_models(
        Settings(
            target=TargetSettings(model=str(target), dtype="fp32", threads=threads),
            draft=DraftSettings(model=str(draft), dtype="fp32", threads=threads),
        )
    )
    return models, time.perf_counter() - start_s


@dataclass(frozen=True, slots=True)
class Probe:
    """Runs prompts on loaded models; every answer has its full length, ends of text being tokens like any other."""

    workers: Workers

    async def results(
        self, prompts: Sequence[Prompt], depth: int, branching: int, temperature: float, num_tokens: int
    ) -> list[Result]:
        """Return one result per prompt, its seed being its number."""
        shape = {"nodes": depth * branching, "depth": depth, "branching": branching}
        speculation = Speculation(mode="pingpong", lookup=False, **shape)  # the draft's own acceptance
        workers = self.workers
        orchestrator = Orchestrator(workers.verifier, workers.drafter, workers.tokenizer, speculation)
        return [
            await orchestrator.generate(
                Request(
                    prompt_ids=tuple(workers.tokenizer.encode(prompt.text)),
                    max_new_tokens=num_tokens,
                    sampling=SamplingParams(temperature=temperature),
                    seed=number,
                    ignore_eos=True,
                )
            )
            for number, prompt in enumerate(prompts)
        ]

    async def table(self, prompts: Sequence[Prompt], tell: Tell) -> list[dict[str, object]]:
        """Return the mean acceptance length over depths, temperatures and branchings; depth * branching nodes each."""
        rows: list[dict[str, object]] = []
        for temperature in TEMPERATURES:
            for branching in BRANCHINGS:
                lengths: list[float] = []
                for depth in DEPTHS:
                    found = await self.results(prompts, depth, branching, temperature, NUM_TABLE_TOKENS)
                    lengths.append(round(pooled(found).mean_acceptance_length, 3))
                tell(f"acceptance at T={temperature}, branching {branching}: {lengths}")
                rows.append({"temperature": temperature, "branching": branching, "by_depth": lengths})
        return rows


def pooled(results: Iterable[Result]) -> Acceptance:
    return acceptance(result.speculative_decoding for result in results)


def described(prompts: Sequence[Prompt], results: Sequence[Result]) -> dict[str, object]:
    """Return acceptance over all prompts and with loops apart, in JSON types."""
    looped = [is_loop(result.token_ids) for result in results]
    parts = {
        "in_loops": [result for result, loops in zip(results, looped, strict=True) if loops],
        "outside_loops": [result for result, loops in zip(results, looped, strict=True) if not loops],
    }
    return {
        "num_prompts": len(prompts),
        "num_loops": sum(looped),
        **pooled(results).to_dict(),
        **{
            f"mean_acceptance_length_{name}": pooled(part).mean_acceptance_length
            for name, part in parts.items()
            if part
        },
    }


def sampled_texts(workers: Workers, prompts: Sequence[Prompt], results: Sequence[Result]) -> list[dict[str, object]]:
    """Return prompts and answers as they are, with what counting says of the first 60 tokens."""
    samples: list[dict[str, object]] = []
    for prompt, result in zip(prompts, results, strict=True):
        begun = prompt.text + workers.tokenizer.decode(result.token_ids[:NUM_CHECKED_TOKENS])
        samples.append(
            {
                "prompt": prompt.text,
                "answer": result.text,
                "brackets_match": has_matching_brackets(begun),
                "indentation_is_coherent": has_coherent_indentation(begun),
                "is_loop": is_loop(result.token_ids),
            }
        )
    return samples


async def _measured(
    models: Models, code: Sequence[Prompt], held_out: Sequence[Prompt], num_table_prompts: int, tell: Tell
) -> dict[str, object]:
    found: dict[str, object] = {}
    async with local_workers(models) as workers:
        probe = Probe(workers)
        for name, prompts in (("code_prompts", code), ("held_out_files", held_out)):
            for temperature in (0.0, 1.0):
                results = await probe.results(prompts, *CHAIN_OF_4, temperature, NUM_NEW_TOKENS)
                found[f"{name}_T{temperature:g}"] = described(prompts, results)
                tell(f"chain of 4, {name}, T={temperature:g}: {pooled(results).mean_acceptance_length:.3f}")
                if name == "code_prompts" and temperature == 0.0:
                    found["samples"] = sampled_texts(workers, prompts[:10], results[:10])
        half = num_table_prompts // 2
        found["table"] = await probe.table([*code[: num_table_prompts - half], *held_out[:half]], tell)
    return found


def measure(
    models: Models, code: Sequence[Prompt], held_out: Sequence[Prompt], num_table_prompts: int, tell: Tell
) -> dict[str, object]:
    """Return acceptance of chains of 4 on both sets of prompts, the table, and ten answers."""
    return event_loop.run(_measured(models, code, held_out, num_table_prompts, tell))
