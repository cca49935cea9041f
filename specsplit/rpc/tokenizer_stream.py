"""A tokenizer's files as the messages of one stream and back, limited in size. Knows nothing of their contents."""

from __future__ import annotations

import re
from collections.abc import Iterator

from specsplit.core.types import TokenizerFiles
from specsplit.limits import MAX_EOS_IDS, MAX_TOKENIZER_BYTES, MAX_TOKENIZER_FILES
from specsplit.rpc.codec import checked_hash, require, require_at_most
from specsplit.rpc.pb import target_pb2

_PIECE_BYTES = 256 << 10
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_. +-]{0,127}")
"""Matches a plain file name."""


def encode_tokenizer(tokenizer: TokenizerFiles) -> Iterator[target_pb2.GetTokenizerResponse]:
    """Yield the messages that carry `tokenizer`."""
    size = sum(map(len, tokenizer.files.values()))
    yield target_pb2.GetTokenizerResponse(hash=tokenizer.hash, eos_ids=tokenizer.eos_ids, size=size)
    for name, data in tokenizer.files.items():
        # An empty file has one message, too: its name is all there is of it.
        for start in range(0, max(len(data), 1), _PIECE_BYTES):
            yield target_pb2.GetTokenizerResponse(file_name=name, data=data[start : start + _PIECE_BYTES])


class TokenizerReader:
    """Puts the files together from the messages of one stream."""

    def __init__(self) -> None:
        self._head: target_pb2.GetTokenizerResponse | None = None
        self._files: dict[str, bytearray] = {}
        self._size = 0

    def add(self, message: target_pb2.GetTokenizerResponse) -> None:
        """Add the next message.

        Raises:
            InvalidRequest: too many or too large files, more than was announced, a name that is no plain file name, or
                a hash that is none.
        """
        if self._head is None:
            checked_hash(message.hash)
            require(
                message.size <= MAX_TOKENIZER_BYTES, "size", f"The tokenizer is larger than {MAX_TOKENIZER_BYTES} B."
            )
            require_at_most(MAX_EOS_IDS, message.eos_ids, "eos_ids")
            self._head = message
            return
        # The client writes files under these names, so a path, as in `../x`, must not pass.
        name = message.file_name
        require(_FILE_NAME.fullmatch(name) is not None, "file_name", "A tokenizer file's name is no plain file name.")
        self._size += len(message.data)
        require(self._size <= self._head.size, "size", "The tokenizer's files are larger than was announced.")
        self._files.setdefault(name, bytearray()).extend(message.data)
        require_at_most(MAX_TOKENIZER_FILES, self._files, "files")

    def finish(self) -> TokenizerFiles:
        """Return all files.

        Raises:
            InvalidRequest: parts are missing.
        """
        head = self._head
        is_whole = head is not None and bool(head.hash) and self._size == head.size
        require(is_whole, "size", "The tokenizer's files did not arrive whole.")
        assert head is not None
        files = {name: bytes(data) for name, data in self._files.items()}
        return TokenizerFiles(hash=head.hash, eos_ids=tuple(head.eos_ids), files=files)
