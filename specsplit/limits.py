"""Every limit of size, number and time for what others send: over gRPC, HTTP and LMTP. Knows nothing else.

The gateway refuses early what is beyond them; each worker and stage enforces its own again. docs/protocol.md has
them as a table (section 8). What an operator may choose is in the settings.
"""

from __future__ import annotations

# Messages, calls and streams of every server.
MAX_MESSAGE_BYTES = 16 << 20
"""Bytes of one message, both ways. A worker announces less where its context and vocabulary allow less."""
MAX_REQUEST_BYTES = 64 << 20
"""Sum over all requests being decoded and served. It admits four of the largest; decoded they take some times more."""
SMALL_BYTES = 64 << 10
"""Size up to which a request counts as small: a round, or a prompt of some ten thousand tokens."""
MAX_CALL_S = 600.0
"""The longest any call runs on a server, whatever deadline its client set."""
MAX_CONNECTION_STREAMS = 1024
"""Calls and streams of one connection under way; further ones wait at the client."""
MAX_PEER_STREAMS = 1024
"""Streams of one peer that may be open, over all its connections; one more is refused."""
MAX_PROBES = 8
"""Checks of one connection to the port for probes under way; further ones wait at the client."""
MAX_ROUNDS = 1024
"""Largest number of unanswered rounds of one stream at a server; more are refused."""
MAX_KNOWN_SESSIONS = 65_536
"""Sessions that are remembered; beyond them those without an owner are forgotten, the least recently used first."""

# A session's turns, and scores.
MAX_SESSION_KEY = 64
MAX_CALLER = 64
MAX_REQUEST_ID = 128
MAX_TAIL = 1 << 20
"""Token ids in one list: a prompt, a tail, or what is scored. The context of a worker is the tighter limit."""
MAX_TOKENS = 1 << 31
"""Tokens that an answer may be asked to have; the context ends it before."""
MAX_LOGIT_BIAS = 1 << 18
"""Biased tokens of a request; half of the largest vocabularies, since a mask may name the smaller half."""
MAX_BIAS = 1e4
MAX_EOS_IDS = 4096
MAX_TOP_LOGPROBS = 20
"""Likeliest tokens per position that a session or a score may ask for, as in OpenAI's API."""
MAX_PRIORITY = 9

# Token trees.
MAX_NODES = 4096
"""Nodes of a tree, and each limit of a budget or a stream; a worker's own is tighter."""
MAX_NUMBER = 1 << 31
"""Largest number of a node that a client may say it knows."""
FIRST_FOUND = MAX_NUMBER + 1
"""The number of the first of those nodes that a streaming target adds to a tree itself."""
MAX_DEPTH = 64
MAX_STREAM_NODES = 1024
"""Nodes below the text's end that a streaming target holds at most; it drops the rest, and nobody sends them again."""

# Waiting.
OPEN_S = 20.0
"""Longest time from the beginning of a stream to its first message."""
SILENCE_S = 5.0
"""A client that acknowledges nothing for so long loses its slot as soon as somebody waits for one."""
MAX_WAIT_S = 300.0
"""Longest wait of one call for a slot; whoever waits longer has to come again."""
MIN_RETRY_S = 0.05
"""Shortest pause before whoever was refused asks again, whatever the refusal says."""
MAX_REFUSED_S = 3600.0
"""Longest time for which a request without a deadline, or a stream of LMTP, comes back to whoever refuses it."""
MAX_WAITING_SCORES = 64
"""Scores of one caller that may wait; one more is refused."""

# Words, names and files of a peer.
MAX_WORDS = 1000
"""Characters of the longest sentence of a peer."""
MAX_NAME = 200
MAX_HASH = 64
MAX_NUMERICS = 16
MAX_STEP_TIMES = 64
MAX_TOKENIZER_BYTES = 64 << 20
MAX_TOKENIZER_FILES = 64
MAX_TOKENIZER_CACHE_BYTES = 512 << 20
"""Size of all tokenizers in a user's cache. Chosen: some thirty of the largest ones."""
MAX_TOKENIZER_MEMORY_BYTES = 2 << 30
"""Address space of the process that works with one. Chosen: the tokenizers of 262,144 tokens take a third of it."""
TOKENIZER_LOAD_S = 20.0
"""Processor time of reading one, in seconds. Chosen: those of 262,144 tokens take two."""
TOKENIZER_CALL_S = 5.0
"""Processor time of one call, in seconds, beside what its text may take."""
MAX_RENDERED_TEXT = 16 << 20
"""Longest text that a chat template may make, in characters."""

# Stages.
MAX_STAGES = 1024
MAX_COORDINATOR = 64
MAX_SECRET_BYTES = 64
MAX_PACKET_BYTES = 512 << 20
MAX_UNFINISHED_BYTES = 512 << 20
"""Sum over the packets that have not come whole, of all streams to a stage, and of all of a chain's to its target.

Slots that are imported have their own room: that of the largest one of the stage.
"""
MAX_PACKET_ROWS = 1 << 16
"""Rows of one session in one packet: indices of rows fit two bytes."""
HELLO_S = 2.0
"""Longest time from the beginning of a stream between stages to its first frame."""
PIECE_S = 10.0
"""Longest time between two pieces of a slot that is imported."""

# HTTP and LMTP.
MAX_BODY_BYTES = 1 << 20
"""Bytes of a body unless --max-body-mib says more."""
BODY_S = 30.0
"""A body that has not come whole by then is given up."""
MAX_HEAD_BYTES = 32 << 10
HEADERS_S = 10.0
"""A connection without a whole request head for so long is closed; one that was never used, too."""
KEEP_ALIVE_S = 75
"""An idle connection that was used is closed after so long.

Chosen: longer than proxies keep theirs (AWS's load balancers and nginx's upstreams: 60 s). If the server closed first,
a proxy would now and then send a request on a connection that is being closed, and answer 502.
"""
SEND_S = 60.0
"""A client of HTTP that takes nothing of its answer for so long is cut off."""
MAX_CHOICES = 128
"""Answers to one request: its prompts times `n`."""
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_TIMEOUT_S = 86400
MAX_SPEAKER = 64
"""Characters of a speaker's name, as in OpenAI's API."""
MAX_TEMPLATE_VARIABLES = 32
"""Variables that one request may give to the chat template."""
MAX_TEMPLATE_TEXT = 4096
"""Characters of one that is a text."""
MAX_FRAME_BYTES = 16 << 20
"""The longest frame that a client of LMTP may send."""
MAX_LMTP_STREAMS = 1000
"""Streams of one client of LMTP that may be open at once."""
MAX_OPEN_CHARACTERS = 64 << 20
"""Sum over the frames that began them; most wait for their turn. It admits four of the longest."""
MAX_SCRAPE_BYTES = 8 << 10
"""Longest head of a request to the port for Prometheus; a longer one has its connection closed."""
MAX_SCRAPES = 16
"""Connections to that port at once; more are closed at once."""
SCRAPE_S = 5.0
"""Longest time of such a connection, from its beginning to the end of its answer."""
