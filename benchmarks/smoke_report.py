"""The tables of `smoke`."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from benchmarks.agreement import TIE_MARGIN
from benchmarks.report import show_neighbours, spread, table
from benchmarks.smoke import Smoke


def show(console: Console, smoke: Smoke) -> None:
    """Print rates, bars, acceptance and agreement."""
    settings = smoke.settings
    console.print(
        f"embedded pair, fp32, greedy, {settings.num_prompts} prompts x {settings.num_new_tokens} tokens, "
        f"{settings.threads} threads, tree {settings.shape.name} (nodes/depth/branching); "
        f"median of {smoke.num_rounds} alternating rounds, 95 % interval"
    )
    show_neighbours(console, smoke.neighbours_share)
    if smoke.was_interrupted:
        console.print(f"Interrupted: {smoke.num_rounds} of {settings.num_rounds} rounds are whole and shown.")
    _show_rates(console, smoke)
    _show_bars(console, smoke)
    _show_acceptance(console, smoke)
    _show_agreement(console, smoke)


def _show_rates(console: Console, smoke: Smoke) -> None:
    rates = table("Tokens per second", "system", "with the prompt", "decoding only")
    for name, value in sorted(smoke.rates.items(), key=lambda item: -item[1].median):
        decoding = smoke.decode_rates.get(name)
        is_bare = decoding is not None and decoding.samples == value.samples
        rates.add_row(name, "" if is_bare else spread(value, 0), "" if decoding is None else spread(decoding, 0))
    console.print(rates)


def _show_bars(console: Console, smoke: Smoke) -> None:
    bars = table("Bars", "", "measure", "value", "bar", "met", "")
    bars.columns[1].justify = "left"
    bars.columns[-1].justify = "left"
    for bar in smoke.bars:
        bars.add_row(
            bar.id,
            bar.measure,
            spread(bar.value),
            f"{bar.relation} {bar.bound:g}",
            "yes" if bar.is_met else "no",
            escape(bar.note),
        )
    console.print(bars)


def _show_acceptance(console: Console, smoke: Smoke) -> None:
    found = smoke.acceptance
    console.print(
        f"Acceptance: {found.mean_acceptance_length:.2f} tokens a round (bonus included), "
        f"{found.path_acceptance_rate:.1%} of the drafted path, {found.node_acceptance_rate:.1%} of the nodes, "
        f"{found.num_rounds} rounds"
    )
    depths = table("", "", *(str(depth) for depth in range(len(found.histogram))))
    depths.add_row("accepted at depth", "", *("-" if rate is None else f"{rate:.0%}" for rate in found.by_depth))
    depths.add_row("rounds that got there", "", *(str(count) for count in found.tested_by_depth))
    depths.add_row("rounds accepting exactly", *(str(count) for count in found.histogram))
    console.print(depths)


def _show_agreement(console: Console, smoke: Smoke) -> None:
    if not smoke.differences:
        console.print("Agreement: every system wrote the same tokens in every round.")
        return
    num_ties = sum(difference.is_tie for difference in smoke.differences)
    console.print(
        f"Agreement: {len(smoke.differences)} differences from plain, {num_ties} of them ties "
        f"(best two logits within {TIE_MARGIN:g})."
    )
    listed = table("Differences", "system", "prompt", "after", "plain", "got", "margin")
    for item in smoke.differences:
        listed.add_row(
            item.system, item.task, str(item.position), str(item.expected), str(item.got), f"{item.margin:.2e}"
        )
    console.print(listed)
