"""The results file of `run`: lines to samples and back, what makes a round whole, and files that are cut or damaged."""

from __future__ import annotations

import resource
import signal
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import measuring, results_file
from benchmarks.report.console import Progress
from benchmarks.results_file import SWEEP, Writer, read
from benchmarks.systems import Sample, from_record, to_record
from specsplit.core.errors import InvalidRequest, InvalidSettings, ResourceError
from tests.support.bench_runs import (
    ARRIVALS,
    COSTS,
    SPECULATIVE,
    clean_provenance,
    made_header,
    round_records,
    stored_sample,
    write_lines,
)

RESULTS = Path(results_file.__file__).parent / "results"


def test_a_sample_survives_its_line():
    found = stored_sample()
    assert found.token_ids == tuple(range(11))
    assert (found.ttft_s, found.decode_s, found.num_tokens) == (0.1, 0.5, 11)
    assert found.arrivals == ARRIVALS
    assert found.told is not None
    assert found.told.speculative_decoding == SPECULATIVE, "the path's nodes, which are not published, included"
    assert found.told.num_wire_bytes == 1100
    bare = from_record(to_record(0, "bare", "a", Sample(0.5, None, 0.5), 11))
    assert (bare.num_tokens, bare.token_ids, bare.told) == (11, None, None)


def test_only_whole_rounds_count_and_a_torn_last_line_is_ignored(tmp_path: Path):
    header = made_header(plain="plain", generate=None)
    path = write_lines(tmp_path / "a.jsonl", [header, *round_records(0, header), *round_records(1, header)[:3]])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"sample","round":1,"sys')
    found = read(path)
    assert (found.num_rounds, found.is_whole, found.num_dropped) == (1, False, 4)
    assert "1 of 2 rounds" in found.status
    assert [len(rounds) for rounds in found.run().samples.values()] == [1, 1]
    assert found.run().categories == {"code": [0], "prose": [1]}
    with Writer(path) as writer:
        writer.cut(found.num_kept_bytes)
        for record in [*round_records(1, header), {"kind": "summary", "id": "made up"}]:
            writer.add(record)
    again = read(path)
    assert (again.num_rounds, again.is_whole, again.num_dropped, again.status) == (2, True, 0, "")
    assert again.run().costs == {"plain": [COSTS, COSTS]}


def test_a_file_cut_at_any_byte_never_counts_as_whole(tmp_path: Path):
    header = made_header(plain="plain", generate=None)
    path = write_lines(
        tmp_path / "a.jsonl", [header, *round_records(0, header), *round_records(1, header), {"kind": "summary"}]
    )
    content = path.read_bytes()
    start = content.index(b"\n") + 1
    for end in range(start, len(content), 97):
        path.write_bytes(content[:end])
        found = read(path)
        assert not found.is_whole
        assert found.num_kept_bytes <= end
        assert content[: found.num_kept_bytes].endswith(b"\n")


def test_files_from_before_a_setting_are_read_with_what_it_was(tmp_path: Path):
    header = made_header(plain="plain")
    assert "lookup" not in header["settings"]
    assert read(write_lines(tmp_path / "a.jsonl", [header])).header["settings"]["lookup"] is True
    header["settings"]["lookup"] = False
    assert read(write_lines(tmp_path / "b.jsonl", [header])).header["settings"]["lookup"] is False
    sweep = read(RESULTS / "useless-draft.jsonl", SWEEP)
    assert sweep.header["settings"]["lookup"] is True


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no results file"),
        (b'{"benchmark":"smoke"}\n', "no results file"),
        (b"not json\n", "no results file"),
        (b'{"kind":"run","schema":99}\n', "schema 99"),
    ],
)
def test_what_is_no_results_file_is_refused(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=message):
        read(path)


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path):
    header = made_header(plain="plain")
    path = write_lines(tmp_path / "a.jsonl", [header, *round_records(0, header), *round_records(1, header)])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1], b"{}\n", *lines[2:]]))
    with pytest.raises(InvalidRequest, match="Line 3"):
        read(path)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read(tmp_path / "missing.jsonl")


@contextmanager
def _room_for(num_bytes: int) -> Generator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_no_half_line(tmp_path: Path):
    path, header = tmp_path / "a.jsonl", made_header(plain="plain")
    with Writer(path) as writer:
        writer.add(header)
        size = path.stat().st_size
        with _room_for(size + 20), pytest.raises(ResourceError, match="same command"):
            writer.add({"kind": "sample", "filler": "x" * 100})
    assert path.stat().st_size == size
    assert read(path).num_rounds == 0


def test_a_run_that_loads_has_its_file_for_itself(tmp_path: Path):
    path, seen = tmp_path / "a.jsonl", list[int]()

    def set_up(scope: ExitStack) -> measuring.Bench:
        with pytest.raises(InvalidSettings, match="Another run"), Writer(path):
            pass
        seen.append(path.stat().st_size)
        raise ResourceError("There is no memory.")

    header = {**measuring.new_header("run", {"num_rounds": 1}, []), "provenance": clean_provenance()}
    write_lines(path, [header])
    size = path.stat().st_size
    with pytest.raises(ResourceError, match="memory"):
        measuring.measure(path, header, set_up, Progress(Console(quiet=True)), lambda line: None)
    assert (seen, path.stat().st_size) == ([size], size)


def test_two_runs_never_write_to_one_file(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    with Writer(path), pytest.raises(InvalidSettings, match="Another run"), Writer(path):
        pass
    with pytest.raises(InvalidSettings, match="--output"), Writer(tmp_path / "missing" / "a.jsonl"):
        pass
