"""Addresses and the options of channels and servers; knows nothing of services."""

from __future__ import annotations

import ipaddress
import re

from specsplit.core.errors import InvalidRequest
from specsplit.limits import MAX_CONNECTION_STREAMS, MAX_MESSAGE_BYTES, MAX_TOP_LOGPROBS

_TOKEN_BYTES, _BIAS_BYTES = 5, 8
"""Largest size of a token id and of a logit bias on the wire."""
_SCORE_BYTES, _TOP_BYTES, _FRAME_BYTES = 4, 7, 7
"""Largest size on the wire of a score, of one of its likeliest tokens (ids below 2^21), and of the frame of these."""
KEEPALIVE_MS = 1500
KEEPALIVE_TIMEOUT_MS = 1000
_WINDOW_BYTES = 128 << 10
"""Most bytes of a stream of messages that may be on the way: a ping waits behind them."""
_SLOWEST_BYTES_PER_MS = 64
"""Half a megabit a second, the slowest link on which large messages arrive."""

_PING_TIMEOUT = "grpc.http2.ping_timeout_ms"
_BOTH_ENDS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # Without this one a hung peer is noticed only after a minute.
    (_PING_TIMEOUT, KEEPALIVE_TIMEOUT_MS),
    # gRPC would find out how much a link takes, and have that on the way: on a slow one, more than a ping can wait for.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
CLIENT_OPTIONS: list[tuple[str, int]] = [
    *_BOTH_ENDS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This is also the time that one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A worker that restarts elsewhere keeps its name, but not its address.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *_BOTH_ENDS,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    # A port in use is refused, not shared.
    ("grpc.so_reuseport", 0),
]


def client_options(message_bytes: int = 0) -> list[tuple[str, int]]:
    """Return a client's options; a single message of so many bytes has the time that a slow link takes for it.

    All of one message is on the way at once, whatever the window.
    """
    options = dict(CLIENT_OPTIONS)
    options[_PING_TIMEOUT] += message_bytes // _SLOWEST_BYTES_PER_MS
    return [*options.items()]


def server_options(
    max_request_bytes: int = MAX_MESSAGE_BYTES, max_streams: int = MAX_CONNECTION_STREAMS
) -> list[tuple[str, int]]:
    """Return a server's options; a request that announces more bytes is refused before it is received."""
    limits = {
        "grpc.max_receive_message_length": min(max_request_bytes, MAX_MESSAGE_BYTES),
        # Per connection; further calls wait at the client.
        "grpc.max_concurrent_streams": max_streams,
    }
    return [*(dict(SERVER_OPTIONS) | limits).items()]


def largest_request(context: int, vocab_size: int) -> int:
    """Return a size larger than any valid request to a model of that context and vocabulary."""
    # Four contexts, so that a prompt that is only somewhat too long is refused by us, in better words than gRPC's.
    return (1 << 20) + 4 * _TOKEN_BYTES * context + (_TOKEN_BYTES + _BIAS_BYTES) * vocab_size


def check_scores_fit(num_scored: int, top_logprobs: int) -> None:
    """Raise InvalidRequest if the answer to a score would be larger than a message may be."""
    # An engine itself refuses to give more of the likeliest tokens than that.
    num_top = min(top_logprobs, MAX_TOP_LOGPROBS)
    token_bytes = _SCORE_BYTES + (_FRAME_BYTES + _TOP_BYTES * num_top if num_top else 0)
    # A little is left for the telemetry.
    most = (MAX_MESSAGE_BYTES - 1024) // token_bytes
    if num_scored > most:
        raise InvalidRequest(
            f"An answer holds the {top_logprobs} likeliest tokens of at most {most} scored ones, not of {num_scored}; "
            "ask for fewer likeliest tokens, or score fewer at a time.",
            param="top_logprobs",
        )


_ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<name>[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9.])?)):(?P<port>[0-9]{1,5})"
)


def parse_address(address: str, *, listening: bool = False) -> tuple[str, int]:
    """Return host and port of "HOST:PORT"; an IPv6 host stands in brackets, and port 0 is for listening only.

    Raises:
        InvalidRequest: it is no such address.
    """
    match = _ADDRESS.fullmatch(address)
    port = int(match["port"]) if match else 0
    host = (match["ipv6"] or match["name"]) if match else ""
    is_host = match is not None and (match["ipv6"] is None or _ip_version(host) == 6)
    if not is_host or port > 65535 or (port == 0 and not listening):
        example = "127.0.0.1:0 or [::1]:50051" if listening else "127.0.0.1:50051, [::1]:50051 or target:50051"
        raise InvalidRequest(f"{address!r} is no address; write HOST:PORT, as in {example}.", param="address")
    return host, port


def format_address(host: str, port: int) -> str:
    """Return "HOST:PORT", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dial_target(address: str) -> str:
    """Return the gRPC target of `address`: a literal IP as it is, a name through DNS.

    Raises:
        InvalidRequest: the address is malformed.
    """
    host, port = parse_address(address)
    if ":" in host:
        return f"ipv6:{format_address(host, port)}"
    return f"{'ipv4' if _ip_version(host) == 4 else 'dns'}:{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether a host, as an IP address or a name, is this machine, and reached from it alone."""
    try:
        return ipaddress.ip_address(host.removeprefix("::ffff:")).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Return whether a host is every address of this machine: 0.0.0.0 or ::, however it is written."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _ip_version(host: str) -> int | None:
    try:
        return ipaddress.ip_address(host).version
    except ValueError:
        return None
