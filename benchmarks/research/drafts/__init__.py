"""Holds auto against plain decoding with good, useless, slow, dying and returning drafts."""
