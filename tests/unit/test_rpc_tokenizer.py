"""A worker's tokenizer through messages and back, in bounded pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specsplit.core.errors import InvalidRequest
from specsplit.core.types import TokenizerFiles
from specsplit.rpc.pb import target_pb2
from specsplit.rpc.tokenizer_stream import TokenizerReader, encode_tokenizer


def read_tokenizer(messages: list[target_pb2.GetTokenizerResponse]) -> TokenizerFiles:
    reader = TokenizerReader()
    for message in messages:
        reader.add(message)
    return reader.finish()


FILES = TokenizerFiles("abc", (7, 9), {"tokenizer.json": bytes(600_000), "empty.txt": b"", "merges.txt": b"a b"})


def test_a_tokenizer_arrives_whole_in_pieces_far_below_the_message_limit():
    messages = [
        target_pb2.GetTokenizerResponse.FromString(message.SerializeToString()) for message in encode_tokenizer(FILES)
    ]
    assert read_tokenizer(messages) == FILES
    assert max(message.ByteSize() for message in messages) < 1 << 20


def test_a_tokenizer_whose_hash_is_known_travels_without_its_files():
    known = replace(FILES, files={})
    assert read_tokenizer(list(encode_tokenizer(known))) == known


def test_a_tokenizer_that_stops_early_is_refused():
    messages = list(encode_tokenizer(FILES))
    for count in range(len(messages)):
        with pytest.raises(InvalidRequest, match="whole"):
            read_tokenizer(messages[:count])


@pytest.mark.parametrize(
    "pieces",
    [
        [target_pb2.GetTokenizerResponse(hash="a", size=1), target_pb2.GetTokenizerResponse(file_name="f", data=b"ab")],
        *(
            [target_pb2.GetTokenizerResponse(hash="a", size=1), target_pb2.GetTokenizerResponse(file_name=name)]
            for name in ("", "../f", "/f", "a/b", "..", ".hidden", "a\\b", "f" * 200, "a\0b")
        ),
        *([target_pb2.GetTokenizerResponse(hash=one)] for one in ("../a", "\x1b[2J", "a" * 65)),
        [
            target_pb2.GetTokenizerResponse(hash="a"),
            *(target_pb2.GetTokenizerResponse(file_name=f"{i}") for i in range(65)),
        ],
    ],
)
def test_a_tokenizer_stream_without_bounds_or_with_paths_is_refused(pieces: list[target_pb2.GetTokenizerResponse]):
    with pytest.raises(InvalidRequest):
        read_tokenizer(pieces)
