"""The corpus of the embedded pair: what is left out, what is held out, and what it says of itself."""

from __future__ import annotations

import zipfile
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.research.tests.toy_sources import built, module, source
from benchmarks.research.train_pair import corpus, filters, sources
from benchmarks.research.train_pair.sources import Package
from specsplit.core.errors import InvalidSettings


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("demo/tests/helper.py", module(1), "path"),
        ("demo/test_it.py", module(1), "path"),
        ("demo/_vendor/copy.py", module(1), "path"),
        ("demo/api_pb2.py", module(1), "path"),
        ("demo/lib2to3/fixes/fix_print.py", module(1), "path"),
        ("demo/made.py", "# This file was automatically generated from a schema.\n" + module(1), "generated"),
        ("demo/table.py", "TABLE = [\n" + "    0x1234, 0x5678, 0x9abc,\n" * 60 + "]\n", "data"),
        ("demo/minified.py", module(1) + "x = '" + "ab " * 100 + "'\n", "long lines"),
        ("demo/old.py", module(1) + "print 'hello'\n", "not Python 3"),
        ("demo/greek.py", module(1) + "# " + "λόγος " * 30 + "\n", "other script"),
        ("demo/latin.py", module(1).encode() + b"# caf\xe9\n", "size or encoding"),
        ("demo/huge.py", module(1, 4000), "size or encoding"),
        ("demo/tiny.py", "x = 1\n", "size or encoding"),
        ("demo/licence.py", "# All rights are someone's.\n" * 20 + "x = 1\n", "size or encoding"),
    ],
)
def test_a_file_that_teaches_nothing_is_left_out(path: str, text: str | bytes, reason: str):
    found = built(source(path, text), source("demo/good.py", module(2)))
    assert [document.path for document in found.documents] == ["demo/good.py"]
    assert found.rejected == Counter({reason: 1})


def test_a_path_with_test_inside_a_word_is_kept():
    assert not filters.rejects_path("demo/latest/contest.py")


def test_text_is_kept_in_one_form():
    text = filters.decoded(b"\xef\xbb\xbfx = 1  \r\n\r\n\r\n\r\n\r\n\tif_so = 2\r" + module(1).encode())
    assert text is not None
    assert text.startswith("x = 1\n\n\n    if_so = 2\n")


def test_the_split_follows_the_text_and_holds_out_two_percent():
    digests = [filters.fingerprint(module(number)) for number in range(2000)]
    assert 20 <= sum(map(filters.is_held_out, digests)) <= 60
    assert filters.fingerprint("# licence\n\n" + module(3).replace("    ", "\t")) == digests[3]


def test_one_training_file_in_four_keeps_its_header():
    numbers = range(600)
    found = built(*(source(f"demo/f{number}.py", "# Some licence.\n" + module(number, 4)) for number in numbers))
    headed = {held_out: [] for held_out in (True, False)}
    for document in found.documents:
        headed[document.held_out].append(document.text.startswith("# Some licence."))
    assert headed[True]
    assert all(headed[True])
    assert 0.15 < sum(headed[False]) / len(headed[False]) < 0.35


def held_out_number(start: int = 0) -> int:
    return next(n for n in range(start, start + 2000) if filters.is_held_out(filters.fingerprint(module(n, 40))))


def test_a_training_file_near_a_held_out_one_is_left_out():
    original = module(held_out_number(), 40)
    near = original.replace("return first", "return first or None") + "\n\n" + module(5000, 5)
    assert not filters.is_held_out(filters.fingerprint(near))
    found = built(source("demo/near.py", near), source("demo/original.py", original))
    assert [(document.path, document.held_out) for document in found.documents] == [("demo/original.py", True)]
    assert found.rejected == Counter({"near a held-out file": 1})


def test_of_near_duplicates_one_stays_and_of_copies_too():
    number = next(n for n in range(50) if not filters.is_held_out(filters.fingerprint(module(n, 40))))
    text = module(number, 40)
    edited = text + "\n\ndef more():\n    return 1\n"
    given = [source("demo/a.py", text), source("demo/b.py", edited), source("demo/c.py", "# copied\n" + text)]
    found = built(*given)
    assert len(found.documents) == 1
    assert sum(found.rejected.values()) == 2


def test_a_file_that_holds_a_benchmark_prompt_is_left_out():
    prompt = "import shelf\n\n\nclass Clerk:\n    def __init__(self, desk):\n        self.desk, self.open = desk, 1\n"
    given = [source("demo/has.py", module(1) + prompt), source("demo/has_not.py", module(2))]
    found = built(*given, prompts=(prompt,))
    assert [document.path for document in found.documents] == ["demo/has_not.py"]


def test_a_corpus_reads_back_as_written_and_tells_what_it_is_made_of(tmp_path: Path):
    odd = module(1) + "# a line separator \u2028 and a next line \x85 inside\n"
    found = built(source("demo/odd.py", odd), source("demo/other.py", module(2)))
    path = tmp_path / "corpus.jsonl.xz"
    record = corpus.write(path, found, [Package("demo", "1.0", "MIT"), Package("absent", "2.0", "MIT")])
    assert corpus.read(path) == found.documents
    assert [package["name"] for package in record["packages"]] == ["demo"]
    assert corpus.manifest_path(path).exists()
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidSettings, match="cannot be read"):
        corpus.read(path)


def test_every_package_of_the_list_is_pinned_and_has_a_permissive_licence():
    packages = sources.read_packages(sources.FULL_LIST)
    assert len({package.key for package in packages}) == len(packages) > 300
    assert set(sources.read_packages(sources.SMALL_LIST)) < set(packages)
    permissive = ("MIT", "BSD", "Apache-2.0", "PSF", "ISC", "0BSD", "Python-2.0")
    for package in packages:
        parts = package.licence.replace(" AND ", " OR ").split(" OR ")
        assert all(part.startswith(permissive) for part in parts), package


def test_a_package_is_read_from_its_wheel(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "demo_pack-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("demo_pack/a.py", "x = 1\n")
        wheel.writestr("demo_pack/data.json", "{}")
    package = Package("demo-pack", "1.0", "MIT")
    assert [item.path for item in sources.package_sources(package, tmp_path)] == ["demo_pack/a.py"]
    assert sources.download([package], tmp_path, []) == []
