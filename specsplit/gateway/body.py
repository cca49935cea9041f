"""Reads the JSON body of a request: within limits of size and time, strictly, into one of the schemas."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, NoReturn, TypeVar, cast

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from specsplit.core.complaints import rule
from specsplit.gateway.errors import ApiError
from specsplit.gateway.other_servers import our_field
from specsplit.gateway.schemas import Body
from specsplit.limits import BODY_S, SMALL_BYTES

B = TypeVar("B", bound=Body)


async def read_body(request: Request, schema: type[B], max_bytes: int) -> B:
    """Return the body as a `schema`.

    Raises:
        ApiError: it is too large, too slow, no JSON object, or does not fit the schema.
        ClientDisconnect: the client has gone.
    """
    # Without a type it would be taken from any page in a browser, which asks nobody before it sends such a request.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, "The body must be JSON: send it with Content-Type: application/json.")
    content = await _read(request, max_bytes)
    if len(content) <= SMALL_BYTES:
        return validated(schema, strict_json(content))
    # On a thread: a megabyte of messages takes half a second, in which every other answer would stand still.
    return await asyncio.to_thread(lambda: validated(schema, strict_json(content)))


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and len(declared) < 20 and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                content += part
                if len(content) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError as error:
        close = {"connection": "close"}
        raise ApiError(408, f"The body did not come within {BODY_S:g} s.", headers=close) from error
    except ClientDisconnect as error:
        raise ApiError(499, "The client has gone.") from error
    return bytes(content)


def _too_large(max_bytes: int) -> ApiError:
    # The server reads the rest and drops it. If it closed the connection instead, with bytes that nobody has read, the
    # system would reset it, and many clients would see that in place of the answer.
    return ApiError(413, f"The body is larger than {max_bytes} bytes.", code="body_too_large")


def strict_json(content: bytes) -> dict[str, Any]:
    """Return the JSON object in `content`; NaN, infinities and a name that stands twice are refused.

    Raises:
        ApiError: it is no JSON object.
    """
    try:
        # Decoded here, since json itself would let halves of characters pass.
        text = content.decode("utf-8-sig")
        value: object = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_without_duplicates
        )
        # Within the block, for it goes a little deeper than json.loads did.
        has_half_character = b"\\ud" in content.lower() and _has_half_character(value)
    except RecursionError as error:
        raise ApiError(400, "The body is nested too deeply.") from error
    except ValueError as error:  # no UTF-8, no JSON, or a number of too many digits
        raise ApiError(400, f"The body is not valid JSON ({error}).") from error
    if has_half_character:
        raise ApiError(400, "The body has half a character (a lone surrogate), which is no UTF-8.")
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.")
    return cast("dict[str, Any]", value)


def _has_half_character(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return value


def validated(schema: type[B], value: dict[str, Any]) -> B:
    """Return `value` as a `schema`.

    Raises:
        ApiError: a field is unknown, unsupported or malformed; the message names it.
    """
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        name, said = first_complaint(error)
        if error.errors()[0]["type"] == "extra_forbidden":
            ours = our_field(name, schema.model_fields)
            said = f"{name} is not a field of this request{f'; here it is {ours}' if ours else ''}."
            raise ApiError(400, said, param=name, code="unknown_field") from error
        raise ApiError(400, said, param=name or None) from error


def first_complaint(error: ValidationError) -> tuple[str, str]:
    """Return the field that is wrong, empty for the whole, and a sentence; the next ones may follow from the first."""
    first = error.errors(include_url=False, include_input=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    said = rule(first)
    return name, f"{name or 'The request'} {said[:1].lower()}{said[1:]}."
