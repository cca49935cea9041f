"""`figures`: the whole set of results files and their report, each part a command that can be given by hand.

Knows commands only; what has been measured already is not measured again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.environment import commit, is_clean, provenance, require_bench_extra
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.research.inflate import RECORD as INFLATED
from benchmarks.research.made_folder import read_record
from benchmarks.results_file import SCHEMA
from specsplit.core.errors import InvalidSettings, ResourceError

INTERRUPTED = 130
Tell = Callable[[str], None]
MODES = "plain,lookup,pingpong,overlap,auto"
OVER_A_NETWORK = "plain,pingpong,overlap,stream,auto"
REPORT_MINUTES = 0.6
KEPT = ("coupling_study.jsonl", "stage-sessions.jsonl")
"""Part of the report; each has a command of its own."""
_SHIPPED = Path(__file__).parents[1] / "results"
RESULTS, TINY_RESULTS = Path("benchmarks/results"), Path("build/tiny-figures")
PEERS = "generate,assisted,assisted-constant,lookup-4,lookup-10,bare"


@dataclass(frozen=True, slots=True)
class Part:
    """One command after `python -m`; what it writes is `output`."""

    what: str
    arguments: tuple[str, ...]
    output: Path
    resumes: bool = False
    """Whether the command goes on with what `output` holds."""
    minutes: float = 0.0
    """About: counted from the sizes at the rates of results/smoke.jsonl (130 to 570 tokens per second) and
    results/round-trip.jsonl (13 to 56, of the inflated target), with loading, warm-ups and costs, on two cores."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    rounds: int = 9
    sweep_rounds: int = 5
    prompts: int = 4
    tokens: int = 96
    inflated_prompts: int = 3
    inflated_tokens: int = 64
    link_rounds: int = 9
    link_tokens: int = 32
    at_once: tuple[int, ...] = (1, 2, 4, 8)
    rtts_ms: tuple[int, ...] = (0, 2, 10, 40)
    verify_ms: int | None = 25
    """None for a copy that is hardly larger, however long it takes."""
    threads: int = 2
    calibration_prompts: int = 24


FULL = Sizes()
TINY = Sizes(1, 1, 2, 12, 2, 12, 1, 12, (1, 2), (0, 10), None, 1, 2)
"""Shows that every part works; its figures mean nothing."""


def parts(folder: Path, models: Path, sizes: Sizes) -> list[Part]:
    """Return the commands in order; those that need the inflated target come after it."""
    target = models / ("inflated" if sizes.verify_ms is None else f"inflated-{sizes.verify_ms}ms")
    by_size = ("--extra-layers", "1", "--mlp-factor", "1")
    size = by_size if sizes.verify_ms is None else ("--target-ms", str(sizes.verify_ms))
    on_inflated = ("--target", str(target), "--draft", "embedded")
    at_once, rtts = (",".join(map(str, values)) for values in (sizes.at_once, sizes.rtts_ms))

    def measured(what: str, name: str, minutes: float, command: str, *options: str) -> Part:
        output = folder / f"{name}.jsonl"
        arguments = ("benchmarks", command, *options, "--output", str(output))
        return Part(what, arguments, output, resumes=True, minutes=minutes)

    def sized(prompts: int, tokens: int, rounds: int) -> tuple[str, ...]:
        return ("--prompts", str(prompts), "--new-tokens", str(tokens), "--rounds", str(rounds))

    run = ("--threads", str(sizes.threads))
    small = sized(sizes.inflated_prompts, sizes.inflated_tokens, sizes.sweep_rounds)
    profile = folder / "profile.jsonl"
    held, kinds = ("--target", str(target), "--drafts", str(models)), folder / "draft-kinds.jsonl"
    pairs = ("--prompts", "2", "--new-tokens", str(sizes.link_tokens), "--pairs", str(sizes.rounds))
    calibration = folder / "calibration.jsonl"
    judged = ("--prompts", str(sizes.calibration_prompts), "--new-tokens", str(sizes.tokens))
    inflate = ("benchmarks.research", "inflate", "--to", str(target), *size, "--threads", "1")
    return [
        measured("systems, embedded pair", "embedded", 3.8, "run", "--systems", f"{MODES},{PEERS}", *run,
                 *sized(sizes.prompts, sizes.tokens, sizes.rounds)),
        Part("inflated target", inflate, target, minutes=1),
        measured("systems, inflated target", "inflated", 3.2, "run", "--systems",
                 f"{MODES},generate,lookup-10,bare", *run, *on_inflated, *small),
        measured("round trip, inflated target", "round-trip", 7.7, "sweep", "--modes", OVER_A_NETWORK,
                 "--rtt-ms", rtts, *on_inflated, *sized(2, sizes.link_tokens, sizes.link_rounds)),
        Part("a useless draft, inflated target",
             ("benchmarks.research", "draft-kinds", "--kind", "useless", *held, *pairs, "--output", str(kinds)), kinds,
             resumes=True, minutes=0.9),
        measured("sessions at once, embedded pair", "concurrency", 2.6, "sweep", "--modes", "plain,pingpong,overlap",
                 "--concurrency", at_once, *sized(sizes.at_once[-1], sizes.inflated_tokens, sizes.sweep_rounds)),
        measured("temperature, embedded pair", "temperature", 1.9, "sweep", "--modes", "plain,pingpong,overlap",
                 "--temperature", "0,0.6,1", *sized(sizes.inflated_prompts, sizes.tokens, sizes.sweep_rounds)),
        Part("calibration, embedded pair",
             ("benchmarks", "calibration", *judged, "--output", str(calibration)), calibration, minutes=0.8),
        Part("a profile", ("benchmarks", "profile", "--output", str(profile)), profile, minutes=0.2),
    ]  # fmt: skip


def run(folder: Path, models: Path, sizes: Sizes, *, is_fresh: bool, tell: Tell) -> int:
    """Run every part and write the report; return 0, or 130 where Ctrl-C ended it between whole rounds.

    Raises:
        InvalidSettings: the folders cannot be made.
        ResourceError: a part failed; it has said why.
    """
    listed = parts(folder, models, sizes)
    try:
        for each in (folder, models):
            each.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSettings(f"The folder {error.filename} cannot be made ({error.strerror}).") from error
    start_s = time.monotonic()
    tell(f"{len(listed) + 1} parts, about {minutes(listed):.0f} minutes on two free cores.")
    for number, part in enumerate(listed, 1):
        _clear(part, is_fresh=is_fresh, tell=tell)
        if part.output.exists() and not part.resumes:
            tell(f"[{number}/{len(listed) + 1}] {part.what}: {part.output} is there already.")
            continue
        tell(f"[{number}/{len(listed) + 1}] {part.what}: {command_line(part.arguments)}")
        code = run_command(part.arguments)
        if code == INTERRUPTED:
            tell("Interrupted; what is whole is kept, and the same command goes on.")
            return INTERRUPTED
        if code:
            raise ResourceError(
                f"The part {part.what} failed, see above; the same command tries again, --fresh from scratch."
            )
    files = [str(part.output) for part in listed if part.output.suffix == ".jsonl"] + kept(folder)
    page = ("--uncommitted", "--output", str(folder / "report.html"), "--plots", str(folder / "plots"))
    code = run_command(("benchmarks", "report", *files, *page))
    if code not in (0, INTERRUPTED):
        raise ResourceError("The report failed, see above.")
    # Only the full set needs a commit.
    bars = ("benchmarks", "network-bars", *(("--uncommitted",) if sizes == TINY else ()))
    if code == 0 and run_command((*bars, str(folder / "round-trip.jsonl"))) != 0:
        raise ResourceError("The bars could not be checked, see above.")
    tell(f"{folder / 'report.html'} after {(time.monotonic() - start_s) / 60:.1f} minutes.")
    return code


def minutes(listed: Sequence[Part]) -> float:
    """Return about how long the parts and their report take."""
    return sum(part.minutes for part in listed) + REPORT_MINUTES


def kept(folder: Path) -> list[str]:
    """Return the files of what takes too long to be measured each time: those in `folder`, else the shipped ones."""
    places = [(folder / name, _SHIPPED / name) for name in KEPT]
    return [str(next(place for place in each if place.exists())) for each in places if any(map(Path.exists, each))]


def command_line(arguments: Sequence[str]) -> str:
    """Return the command as people give it."""
    return " ".join(("python", "-m", *arguments))


def _clear(part: Part, *, is_fresh: bool, tell: Tell) -> None:
    """Remove what the part shall write anew: everything if `is_fresh`, else what is not known to be of this checkout.

    A part counts if it is of the same commit and had uncommitted changes only if there are some now.
    """
    found, is_changed = _origin_of(part), provenance()["has_uncommitted_changes"]
    is_of_now = found.get("commit") == commit() and found.get("has_uncommitted_changes", is_changed) == is_changed
    if not part.output.exists() or (is_of_now and not is_fresh):
        return
    tell(f"Replacing {part.output}.")
    if part.output.is_dir():
        shutil.rmtree(part.output)
    else:
        part.output.unlink()


def _origin_of(part: Part) -> dict[str, Any]:
    """Return the commit of a results file's first line or a folder's record, and whether there were changes beside it.

    Empty if there is none to rely on.
    """
    if part.output.is_dir():
        return read_record(part.output, INFLATED)
    try:
        with part.output.open("rb") as file:
            header = json.loads(file.readline())
        return dict(header["provenance"]) if header.get("schema", SCHEMA) == SCHEMA else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def run_command(arguments: Sequence[str]) -> int:
    """Run a part; Ctrl-C reaches it as well, and it ends when its run is whole."""
    process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.DEVNULL)
    try:
        return process.wait()
    except KeyboardInterrupt:
        code = process.wait()
        return INTERRUPTED if code in (0, INTERRUPTED, -2) else code


@app.command()
def figures(
    output: Annotated[
        Path | None, typer.Option(help=f"Folder of the results: {RESULTS}, of --tiny {TINY_RESULTS}.", file_okay=False)
    ] = None,
    models: Annotated[Path, typer.Option(help="Folder of inflated targets.", file_okay=False)] = Path("build/bench"),
    tiny: Annotated[bool, typer.Option("--tiny", help="See that every part works; the figures mean nothing.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is there.")] = False,
) -> None:
    """Measure the whole set of figures and write their report; what is whole is not measured again."""
    require_bench_extra()
    console = report.new_console()
    sizes, folder = (TINY, output or TINY_RESULTS) if tiny else (FULL, output or RESULTS)
    if tiny and folder.resolve() == _SHIPPED.resolve():
        raise InvalidSettings(f"Figures of --tiny mean nothing; name another folder than {folder}.")
    if not tiny and not is_clean(provenance()):
        raise InvalidSettings(
            "The tree has changes that are in no commit, so nobody could measure it again; commit first."
        )
    code = run(
        folder, models, sizes, is_fresh=fresh, tell=lambda line: console.print(line, markup=False, soft_wrap=True)
    )
    raise typer.Exit(code)
