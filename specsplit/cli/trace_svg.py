"""Draws a request's time line as an SVG: a lane each for target, stages and draft, with the rounds behind them."""

from __future__ import annotations

from html import escape

from specsplit.cli.trace_file import Span, TracedRequest, shares, title

_WIDTH, _LEFT, _TOP, _LANE, _BAR = 1400, 110, 56, 34, 22
_COLOURS = {"target": ("#1f6feb", "#c9dffc"), "draft": ("#1a7f37", "#c8ecd1")}
"""The colours of a lane: computing, and waited for."""
_STAGE_COLOURS = ("#8250df", "#e4d8fb")
_BANDS = ("#f6f8fa", "#ffffff")
_MOST_NUMBERS = 60
"""With more rounds their numbers would not be read."""


def drawn(request: TracedRequest) -> str:
    """Return the picture."""
    lanes = request.lanes
    start_ns, end_ns = request.rounds[0].start_ns, request.rounds[-1].end_ns
    height = _TOP + len(lanes) * _LANE + 36
    per_ns = (_WIDTH - _LEFT - 20) / max(1, end_ns - start_ns)

    def x(time_ns: int) -> float:
        return _LEFT + (min(max(time_ns, start_ns), end_ns) - start_ns) * per_ns

    size = f'width="{_WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect {size} fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14" font-weight="bold">{escape(title(request))}</text>',
        f'<text x="{_WIDTH - 20}" y="20" text-anchor="end" fill="#57606a">dark: computes; light: waited for</text>',
    ]
    for index, each in enumerate(request.rounds):
        lines += _band(each, index, x(each.start_ns), x(each.end_ns), height, len(request.rounds) <= _MOST_NUMBERS)
    for place, (lane, computed, _) in enumerate(shares(request)):
        middle = _TOP + place * _LANE + _LANE / 2 + 4
        share = "" if computed is None else f" {computed:.0%}"
        lines.append(f'<text x="8" y="{middle:.0f}">{escape(lane)}{share}</text>')
    # Whoever waits is drawn first, and whoever computes for it over that.
    for part in sorted(request.parts, key=lambda part: part.is_computing):
        lane = str(part.lane)
        lines.append(_part(part, x(part.start_ns), x(part.end_ns), _TOP + lanes.index(lane) * _LANE))
    lines += _axis(end_ns - start_ns, height)
    return "\n".join([*lines, "</svg>", ""])


def _band(each: Span, index: int, left: float, right: float, height: int, has_number: bool) -> list[str]:
    attributes = each.attributes
    told = f"round {attributes.get('round', '?')}: {_ms(each)}, accepted {attributes.get('accepted', 0)} of "
    told += f"{attributes.get('nodes', 0)} nodes"
    band = (
        f'<rect x="{left:.2f}" y="{_TOP - 6}" width="{right - left:.2f}" height="{height - _TOP - 24}" '
        f'fill="{_BANDS[index % 2]}"><title>{escape(told)}</title></rect>'
    )
    number = f'<text x="{(left + right) / 2:.1f}" y="{_TOP - 12}" text-anchor="middle" fill="#57606a" font-size="10">'
    number += f"{escape(str(attributes.get('round', '')))}</text>"
    return [band, number] if has_number else [band]


def _part(part: Span, left: float, right: float, top: int) -> str:
    dark, light = _COLOURS.get(str(part.lane), _STAGE_COLOURS)
    told = ", ".join([f"{part.name}: {_ms(part)}", *(f"{name} {value}" for name, value in part.attributes.items())])
    return (
        f'<rect x="{left:.2f}" y="{top + (_LANE - _BAR) / 2:.0f}" width="{max(right - left, 0.5):.2f}" height="{_BAR}" '
        f'fill="{dark if part.is_computing else light}"><title>{escape(told)}</title></rect>'
    )


def _axis(total_ns: int, height: int) -> list[str]:
    """Return the scale below: five marks in milliseconds."""
    marks: list[str] = []
    for fifth in range(6):
        at = _LEFT + (_WIDTH - _LEFT - 20) * fifth / 5
        label, anchor = f"{total_ns / 1e6 * fifth / 5:.0f} ms", "end" if fifth == 5 else "middle"
        marks.append(f'<text x="{at:.0f}" y="{height - 10}" text-anchor="{anchor}" fill="#57606a">{label}</text>')
    return marks


def _ms(span: Span) -> str:
    return f"{(span.end_ns - span.start_ns) / 1e6:.2f} ms"
