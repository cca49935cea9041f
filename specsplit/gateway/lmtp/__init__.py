"""LMTP, the language model transport protocol of LMQL: token streams interleaved over one channel."""
