"""The bits of several workers together: promised only if each promises them, with the same known numerics.

A promise that did not arrive, or not as one, is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from specsplit.core.errors import InvalidRequest
from specsplit.core.exactness import Exactness, joint_exactness, joint_numerics, shown_exactness
from specsplit.core.types import Identity
from specsplit.rpc import calls, codec
from specsplit.rpc.pb import common_pb2


@dataclass
class Part:
    exactness: Exactness = "bits"
    numerics: str = "abc"


@pytest.mark.parametrize(
    ("parts", "exactness", "numerics"),
    [
        ([], "near ties", ""),
        ([Part()], "bits", "abc"),
        ([Part(), Part()], "bits", "abc"),
        ([Part(), Part("near ties")], "near ties", "abc"),
        ([Part(), Part(numerics="def")], "near ties", ""),
        ([Part(numerics="")], "near ties", ""),
        ([Part(), Part(numerics="")], "near ties", ""),
        ([Part("near ties", "abc")], "near ties", "abc"),
    ],
)
def test_parts_together_have_bits_only_if_all_say_so_alike(parts: list[Part], exactness: str, numerics: str):
    assert (joint_exactness(parts), joint_numerics(parts)) == (exactness, numerics)


def test_unknown_numerics_are_shown_as_such():
    assert shown_exactness(Part()) == "bits, numerics abc"
    assert shown_exactness(Part("near ties", "")) == "near ties, numerics unknown"


@pytest.mark.parametrize("word", [None, "", "Bits", "bits up to rounding", "\x1b[2Jbits"])
def test_a_worker_that_does_not_promise_bits_has_near_ties(word: str | None):
    """A worker of an earlier release leaves the new fields out."""
    message = codec.encode_identity(Identity("target", "m", 9, "v", 8, 8, exactness="bits", numerics="abc"), "1.0")
    message.ClearField("numerics")
    message.ClearField("exactness")
    if word is not None:
        message.exactness = word
    arrived = codec.decode_identity(calls.parse(common_pb2.Identity, message.SerializeToString()))
    assert (arrived.exactness, arrived.numerics, arrived.revision) == ("near ties", "", 0)


@pytest.mark.parametrize("numerics", ["a" * 17, "../etc", "\x1b[2J", "fp32 avx2"])
def test_numerics_that_are_no_fingerprint_are_refused(numerics: str):
    message = codec.encode_identity(Identity("target", "m", 9, "v", 8, 8), "1.0")
    message.numerics = numerics
    with pytest.raises(InvalidRequest, match="no fingerprint"):
        codec.decode_identity(message)
