# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false, reportPossiblyUnboundVariable=false
"""Attention over KV slots on a GPU: Triton kernels that read a step's layout from the device's memory.

Their launches depend on no number of a step, so a CUDA graph of a forward serves every step of as many tokens: chains,
trees and several sessions alike. The rows of a slot are shared out among programs, whose parts are merged afterwards.

Legend: T tokens of the step, H KV heads, G query heads per KV head, S rows of a slot, D head size, B blocks of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specsplit.model.attention.device_step import WORD_BITS, DeviceStep
from specsplit.model.attention.function import LayerSpec

BLOCK_ROWS = 64
"""Query rows (tokens times query heads of a KV head) of a program, at most."""
_LEAST_ROWS = 16
"""A product on tensor cores has at least so many."""
_KEY_BYTES = 1 << 14
"""Keys, and values, that a program reads at a time; several such pieces are on their way in its shared memory."""
_PROGRAMS = 256
"""Programs that keep a large GPU busy while a few tokens attend."""
_LOG2_E = 1.4426950408889634


@triton.jit
def _store(
    k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, rows_ptr,
    k_token, k_head, v_token, v_head, key_slot, key_head, value_slot, value_head,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one head of one token's key and value to its row; a token without a slot has none."""
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        row = tl.load(rows_ptr + token)
        column = tl.arange(0, KEY_BLOCK)
        key = tl.load(k_ptr + token * k_token + head * k_head + column, mask=column < KEY_DIM)
        target = keys_ptr + slot * key_slot + head * key_head + row * KEY_DIM + column
        tl.store(target, key, mask=column < KEY_DIM)
        column = tl.arange(0, VALUE_BLOCK)
        value = tl.load(v_ptr + token * v_token + head * v_head + column, mask=column < VALUE_DIM)
        target = values_ptr + slot * value_slot + head * value_head + row * VALUE_DIM + column
        tl.store(target, value, mask=column < VALUE_DIM)


@triton.jit
def _softcapped(score, softcap):
    """Return softcap * tanh(score / softcap), by the exponential of a number that is not positive."""
    small = tl.exp(-2.0 * tl.abs(score) / softcap)
    return tl.where(score < 0, -softcap, softcap) * (1.0 - small) / (1.0 + small)


@triton.jit
def _is_seen(key_row, base, low, first_word, second_word, BITS: tl.constexpr):
    """Return which keys each query sees: those from `low` to `base`, and behind that those whose bit is set."""
    behind = key_row[None, :] - base[:, None]
    word = tl.where(behind < BITS, first_word[:, None], second_word[:, None])
    bit = (word >> (tl.maximum(behind, 0) % BITS)) & 1
    is_of_text = (behind < 0) & (key_row[None, :] >= low[:, None])
    return is_of_text | ((behind >= 0) & (behind < 2 * BITS) & (bit == 1))


@triton.jit
def _with_keys(best, mass, total, score, value, PRECISION: tl.constexpr):
    """Return the best score, the mass and the weighted sum of values with some more keys; a row may have seen none."""
    new_best = tl.maximum(best, tl.max(score, 1))
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    share = tl.exp2(score - shift[:, None])
    shrink = tl.exp2(best - shift)
    added = tl.dot(share.to(value.dtype), value, input_precision=PRECISION)
    return new_best, mass * shrink + tl.sum(share, 1), total * shrink[:, None] + added


@triton.jit
def _attend_parts(
    q_ptr, keys_ptr, values_ptr, parts_ptr, masses_ptr, blocks_ptr, begins_ptr, bases_ptr, lows_ptr, words_ptr,
    scaling, softcap, q_token, q_head, key_slot, key_head, value_slot, value_head, num_heads,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, ROWS: tl.constexpr, KEY_ROWS: tl.constexpr, NUM_PARTS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, BITS: tl.constexpr, LOG2_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with a block's tokens to one part of their slot's rows, in one KV head."""
    block, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(blocks_ptr + block * 4 + 2)
    if count > 0:
        slot, first = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 1)
        end = tl.load(blocks_ptr + block * 4 + 3)
        begin = tl.load(begins_ptr + block)
        length = tl.cdiv(tl.cdiv(end - begin, NUM_PARTS), KEY_ROWS) * KEY_ROWS
        low_row = begin + part * length
        high_row = tl.minimum(end, low_row + length)
        row = tl.arange(0, ROWS)
        is_row = row // GROUP < count
        token = first + row // GROUP
        query_head = head * GROUP + row % GROUP
        place = (token * num_heads * GROUP + query_head) * NUM_PARTS + part
        if low_row < high_row:
            key_column, value_column = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
            place_of_q = (token * q_token + query_head * q_head)[:, None] + key_column[None, :]
            q = tl.load(q_ptr + place_of_q, is_row[:, None] & (key_column < KEY_DIM)[None, :], 0.0)
            base = tl.load(bases_ptr + token, mask=is_row, other=0)
            low = tl.load(lows_ptr + token, mask=is_row, other=0)
            first_word = tl.load(words_ptr + token * 2, mask=is_row, other=0)
            second_word = tl.load(words_ptr + token * 2 + 1, mask=is_row, other=0)
            best = tl.full([ROWS], float("-inf"), tl.float32)
            mass = tl.zeros([ROWS], tl.float32)
            total = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
            keys_ptr += slot * key_slot + head * key_head
            values_ptr += slot * value_slot + head * value_head
            for start in range(low_row, high_row, KEY_ROWS):
                key_row = start + tl.arange(0, KEY_ROWS)
                is_key = key_row < high_row
                place_of_key = key_row[:, None] * KEY_DIM + key_column[None, :]
                key = tl.load(keys_ptr + place_of_key, is_key[:, None] & (key_column < KEY_DIM)[None, :], 0.0)
                score = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scaling
                if HAS_SOFTCAP:
                    score = _softcapped(score, softcap)
                is_seen = _is_seen(key_row, base, low, first_word, second_word, BITS)
                score = tl.where(is_seen & is_key[None, :], score * LOG2_E, float("-inf"))
                place_of_value = key_row[:, None] * VALUE_DIM + value_column[None, :]
                value = tl.load(values_ptr + place_of_value, is_key[:, None] & (value_column < VALUE_DIM)[None, :], 0.0)
                best, mass, total = _with_keys(best, mass, total, score, value, PRECISION)
            has_seen = mass > 0
            total = total / tl.where(has_seen, mass, 1.0)[:, None]
            place_of_part = place[:, None] * VALUE_DIM + value_column[None, :]
            tl.store(parts_ptr + place_of_part, total, is_row[:, None] & (value_column < VALUE_DIM)[None, :])
            log_mass = tl.where(has_seen, best + tl.log2(tl.where(has_seen, mass, 1.0)), float("-inf"))
            tl.store(masses_ptr + place, log_mass, mask=is_row)
        else:
            tl.store(masses_ptr + place, tl.full([ROWS], float("-inf"), tl.float32), mask=is_row)


@triton.jit
def _merge_parts(
    parts_ptr, masses_ptr, sinks_ptr, slots_ptr, out_ptr,
    num_query_heads, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, NUM_PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query head of one token by their masses; a token without a slot gets zeros."""
    token, query_head = tl.program_id(0), tl.program_id(1)
    place = token * num_query_heads + query_head
    column, part = tl.arange(0, VALUE_BLOCK), tl.arange(0, NUM_PARTS)
    if tl.load(slots_ptr + token) >= 0:
        mass = tl.load(masses_ptr + place * NUM_PARTS + part)
        best = tl.max(mass, 0)
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + query_head).to(tl.float32) * LOG2_E
            best = tl.maximum(best, sink)
        share = tl.exp2(mass - best)
        total = tl.sum(share, 0)
        if HAS_SINKS:
            total += tl.exp2(sink - best)
        rows = tl.load(
            parts_ptr + (place * NUM_PARTS + part)[:, None] * VALUE_DIM + column[None, :],
            mask=(share > 0)[:, None] & (column < VALUE_DIM)[None, :], other=0.0,
        )  # fmt: skip
        out = tl.sum(rows * (share / total)[:, None], 0)
    else:
        out = tl.zeros([VALUE_BLOCK], tl.float32)
    tl.store(out_ptr + place * VALUE_DIM + column, out.to(out_ptr.dtype.element_ty), mask=column < VALUE_DIM)


def attend(q: Tensor, k: Tensor, v: Tensor, memory: tuple[Tensor, Tensor], spec: LayerSpec, step: DeviceStep) -> Tensor:
    """Return [1, T, query heads, D] for q, k, v [heads, T, D]; `memory` is keys and values [slots, H, S, D]."""
    keys, values = memory
    layout, kind, softcap = step.layout, spec.mask, spec.softcap or 0.0
    q, k, v = (each if each.stride(2) == 1 else each.contiguous() for each in (q, k, v))
    num_heads, num_tokens, key_dim, value_dim = k.size(0), k.size(1), k.size(2), v.size(2)
    sizes: dict[str, Any] = {"KEY_DIM": key_dim, "VALUE_DIM": value_dim}
    sizes |= {"KEY_BLOCK": max(16, triton.next_power_of_2(key_dim))}
    sizes |= {"VALUE_BLOCK": max(16, triton.next_power_of_2(value_dim))}
    _store[(num_tokens, num_heads)](
        k, v, keys, values, layout.slots, layout.rows, k.stride(1), k.stride(0), v.stride(1), v.stride(0),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), **sizes, num_warps=1,
    )  # fmt: skip
    num_parts = num_parts_of(num_heads, num_tokens)
    parts = torch.empty(num_tokens, q.size(0), num_parts, value_dim, dtype=torch.float32, device=q.device)
    masses = torch.empty(num_tokens, q.size(0), num_parts, dtype=torch.float32, device=q.device)
    key_rows = max(16, min(64, _KEY_BYTES // (max(sizes["KEY_BLOCK"], sizes["VALUE_BLOCK"]) * keys.element_size())))
    _attend_parts[(step.num_blocks, num_heads, num_parts)](
        q, keys, values, parts, masses, layout.blocks, layout.begins[kind], layout.bases,
        layout.lows[kind], layout.words[kind],
        spec.scaling, softcap, q.stride(1), q.stride(0), keys.stride(0), keys.stride(1), values.stride(0),
        values.stride(1), num_heads, GROUP=spec.group, **sizes,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(step.block_tokens * spec.group)), KEY_ROWS=key_rows,
        NUM_PARTS=num_parts, HAS_SOFTCAP=softcap != 0.0, BITS=WORD_BITS, LOG2_E=_LOG2_E,
        PRECISION="ieee", num_warps=4,
    )  # fmt: skip
    out = torch.empty(1, num_tokens, q.size(0), value_dim, dtype=q.dtype, device=q.device)
    sinks = spec.sinks if spec.sinks is not None else masses
    _merge_parts[(num_tokens, q.size(0))](
        parts, masses, sinks, layout.slots, out, q.size(0), VALUE_DIM=value_dim, VALUE_BLOCK=sizes["VALUE_BLOCK"],
        NUM_PARTS=num_parts, HAS_SINKS=spec.sinks is not None, LOG2_E=_LOG2_E, num_warps=4 if num_parts > 4 else 1,
    )  # fmt: skip
    return out


def num_parts_of(num_heads: int, num_tokens: int) -> int:
    """Return into how many parts the rows of a slot are shared out: many for a few tokens, one for a long prompt."""
    programs = num_heads * (1 if num_tokens <= BLOCK_ROWS else num_tokens // BLOCK_ROWS * 4)
    return max(1, min(64, triton.next_power_of_2(_PROGRAMS // programs))) if programs < _PROGRAMS else 1
