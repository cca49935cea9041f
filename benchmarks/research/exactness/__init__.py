"""Whether texts are those of plain decoding, token by token, however they are generated."""
