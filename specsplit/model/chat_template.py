"""Chat messages become token ids by the model's own template, rendered within limits in jinja2's immutable sandbox.

What people write in a message, a speaker's name or a variable never becomes a control token, whatever it looks like:
the text of a control token is hidden from the template behind a mark, and encoded as the ordinary text that it is.
Imports neither torch nor transformers.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from specsplit.core.ports import ChatMessage, Variables
from specsplit.model.limited_process import Refused

_MARK = "\ue000{}\ue001"
"""Private-use characters around a number that nobody can guess."""
_MARKED = re.compile("(\ue000[0-9]+\ue001)")
Encode = Callable[[str, bool], list[int]]
"""Returns the ids of a text without those that a text begins or ends with; if True, with no look for control tokens."""
Render = Callable[[Sequence[ChatMessage], Variables], str]
"""Returns a conversation in the template's words, up to where the assistant's next message begins."""


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The special tokens of a vocabulary, the one for unknown words aside."""

    texts: Sequence[str]
    ids: frozenset[int]


class ChatTemplate:
    """Turns conversations into ids."""

    def __init__(self, controls: ControlTokens, encode: Encode, render: Render) -> None:
        self._encode_part, self._render = encode, render
        self._control_ids = controls.ids
        # Longest first, since one control token's text may begin another's.
        self._controls = sorted(filter(None, controls.texts), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, self._controls)) or r"(?!)")
        self._starts = {control[:length] for control in self._controls for length in range(1, len(control))}
        self._ends = {control[-length:] for control in self._controls for length in range(1, len(control))}
        self._longest_edge = max(map(len, self._controls), default=1) - 1
        self._folded_controls = "\n".join(self._controls).casefold()
        self._first_signs = {control[0] for control in self._controls if not control[0].isalnum()}

    def encode(
        self,
        messages: Sequence[ChatMessage],
        variables: Variables | None = None,
        own_texts: Collection[str] = (),
        continues: bool = False,
    ) -> list[int]:
        """Return the ids of a conversation, up to where the assistant's next message begins; raises as its parts do.

        With `continues` they end where the text of the last message does.

        Raises:
            Refused: then, if the template shows the end of the last message elsewhere than once.
        `own_texts` are those among the variables that stand in the template as literals, such as what it compares with.
        """
        hidden = _HiddenTexts()
        shown = [self._shown_message(message, hidden) for message in messages]
        end = hidden.mark("") if continues else ""
        if continues:
            # A template may trim a text or drop one that is blank, but not what nobody can guess.
            shown[-1]["content"] += end
        given = dict(variables or {})
        for name, value in given.items():
            if isinstance(value, str) and (value not in own_texts or self._control.search(value)):
                given[name] = self._hide_label(value, hidden)
        if continues:
            given["add_generation_prompt"] = False
        text = self._render(shown, given)
        if continues:
            if text.count(end) != 1:
                raise Refused("it changes the last message, so no answer can go on with it")
            text = text[: text.index(end)]
        ids = self._ids_of(hidden, text)
        if (plain := hidden.with_edges(text)) != text:
            # Most edges, such as the > of a quotation, become no control token, and belong to the words beside them.
            plain_ids = self._ids_of(hidden, plain)
            if self._controls_among(plain_ids) == self._controls_among(ids):
                return plain_ids
        return ids

    def _controls_among(self, ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in self._control_ids]

    def _ids_of(self, hidden: _HiddenTexts, text: str) -> list[int]:
        ids: list[int] = []
        for part, is_hidden in hidden.parts(text):
            ids += self._encode_plainly(part) if is_hidden else self._encode(part)
        return ids

    def _shown_message(self, message: ChatMessage, hidden: _HiddenTexts) -> ChatMessage:
        shown: ChatMessage = {"role": message["role"], "content": self._hide_controls(message["content"], hidden)}
        if "name" in message:
            shown["name"] = self._hide_label(message["name"], hidden)
        return shown

    def _hide_label(self, text: str, hidden: _HiddenTexts) -> str:
        """Return a name or variable, with a mark for all of it if a template could make a control token of it.

        Unlike a content it may be set between two parts of a control token, as in <|{{ name | trim | lower }}|>, or be
        a pattern that a function of the template fills in.
        """
        is_part = text.casefold() in self._folded_controls
        if text and (is_part or text != text.strip() or not self._first_signs.isdisjoint(text)):
            return hidden.mark(text)
        return self._hide_controls(text, hidden)

    def _hide_controls(self, content: str, hidden: _HiddenTexts) -> str:
        """Return `content` with marks for all that is, or beside the template's text could become, a control token."""
        shown = self._control.sub(lambda match: hidden.mark(match[0]), content)
        head = self._length_at_edge(shown, at_start=True)
        shown = hidden.mark_edge(shown[:head]) + shown[head:] if head else shown
        tail = len(shown) - self._length_at_edge(shown, at_start=False)
        shown = shown[:tail] + hidden.mark_edge(shown[tail:]) if tail < len(shown) else shown
        # A normalizer may make a control token of other letters, and a vocabulary of words know it as a word.
        has_control = any(
            not is_hidden and not self._control_ids.isdisjoint(self._encode(part))
            for part, is_hidden in hidden.parts(shown)
        )
        return hidden.mark(content) if has_control else shown

    def _length_at_edge(self, text: str, *, at_start: bool) -> int:
        """Return how much of the start of `text` ends a control token's text, or of its end begins one."""
        for length in range(min(len(text), self._longest_edge), 0, -1):
            if text[:length] in self._ends if at_start else text[-length:] in self._starts:
                return length
        return 0

    def _encode(self, text: str) -> list[int]:
        return self._encode_part(text, False)

    def _encode_plainly(self, text: str) -> list[int]:
        """Return ids of `text`, none of them a control token's."""
        ids = self._encode_part(text, True)
        if self._control_ids.isdisjoint(ids):
            return ids
        # The model's own vocabulary has the control token's text as one word, so it is spelled.
        spelled = [self._encode(letter) for letter in text]
        return [token_id for letter in spelled for token_id in letter if token_id not in self._control_ids]


class _HiddenTexts:
    """The texts that one conversation hides from its template, each behind a mark."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._edges: set[str] = set()
        """Marks of texts that are a part of a control token at most."""

    def mark(self, text: str) -> str:
        """Return the mark to stand for `text`, in which earlier marks are resolved."""
        mark = _MARK.format(secrets.randbelow(10**18))
        self._texts[mark] = "".join(part for part, _ in self.parts(text))
        return mark

    def mark_edge(self, text: str) -> str:
        """Return the mark of a text that only with its neighbours may become a control token."""
        mark = self.mark(text)
        self._edges.add(mark)
        return mark

    def with_edges(self, text: str) -> str:
        """Return `text` with such texts in the place of their marks."""
        if not self._edges:
            return text
        return _MARKED.sub(lambda found: self._texts[found[0]] if found[0] in self._edges else found[0], text)

    def parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield the parts of `text` in order, and whether each was hidden."""
        shown = ""
        for part in _MARKED.split(text):
            if part in self._texts:
                if shown:
                    yield shown, False
                yield self._texts[part], True
                shown = ""
            else:
                shown += part  # what only looks like a mark is a part of its neighbours
        if shown:
            yield shown, False
