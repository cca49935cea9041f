"""The targets that compute one text, each in the place of the one before: whether they fit, what they promise together.

A target of another model is refused. One that does not promise the same bits goes on with the text, and the result
says so.
"""

from __future__ import annotations

from specsplit.core.errors import PeerMismatch
from specsplit.core.exactness import Exactness, joint_exactness, joint_numerics, shown_exactness
from specsplit.core.types import Identity


class TargetHistory:
    """The targets of one text, which `first` began."""

    def __init__(self, first: Identity) -> None:
        self.revision = first.revision
        """The revision of the target's numerics, from its last identity or verdict."""
        self._targets = [first]
        self._is_revised = False

    def add(self, target: Identity) -> None:
        """Count a target that goes on with the text, be it the same one as before.

        Raises:
            PeerMismatch: it computes another text than the first one, or has less room.
        """
        first = self._targets[0]
        differences = {
            "another vocabulary": target.vocab_hash != first.vocab_hash,
            "other weights": target.weights_hash != first.weights_hash,
            f"dtype {target.dtype}, not {first.dtype}": target.dtype != first.dtype,
            f"context {target.context}, not {first.context}": target.context < first.context,
        }
        if any(differences.values()):
            how = "; ".join(name for name, differs in differences.items() if differs)
            raise PeerMismatch(
                f"The target was replaced by another model ({target.model}: {how}) in the middle of a text begun by "
                f"{first.model}; send the request again."
            )
        self.revision = target.revision
        self._targets.append(target)

    def revise(self, revision: int) -> None:
        """Count a change of the target's own numerics, as a verdict reported it."""
        self.revision, self._is_revised = revision, True

    @property
    def exactness(self) -> Exactness:
        """Return "bits" if every target said so, with the same numerics from the first token to the last."""
        return "near ties" if self._is_revised else joint_exactness(self._targets)

    @property
    def numerics(self) -> str:
        """Return the numerics of all targets, empty if they differed or are unknown."""
        return "" if self._is_revised else joint_numerics(self._targets)

    @property
    def exactness_reason(self) -> str:
        """Return why a text that was begun with the promise of bits lost it, in a sentence; empty if it did not."""
        first = self._targets[0]
        if joint_exactness([first]) != "bits" or self.exactness == "bits":
            return ""
        others = [target for target in self._targets if joint_exactness([first, target]) != "bits"]
        how = f" ({shown_exactness(first)}; then {shown_exactness(others[0])})" if others else ""
        return (
            f"In the middle of the text the target or a stage of it was replaced by one with other numerics{how}, "
            "so the text may differ from plain decoding at near ties."
        )
