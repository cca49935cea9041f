"""Long rotary embeddings that never switch: cached keys stay right whatever length a session reaches."""

from __future__ import annotations

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specsplit.model.transformers_models import PreTrainedModel


def fix_longrope(model: PreTrainedModel, context: int) -> None:
    """Fix the frequencies of `longrope` modules by `context` (short up to the original length, long beyond).

    transformers chooses anew at every forward by the longest position in it, which changes the keys of a session that
    grows past the original length.
    """
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "longrope":
        return
    for module in model.modules():
        if getattr(module, "rope_type", None) != "longrope":
            continue
        # All three must agree: transformers copies one of the others into inv_freq when the length crosses the border.
        frequencies = module.original_inv_freq
        original = parameters["original_max_position_embeddings"]
        if context > original:
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](config, model.device, seq_len=original + 1)
        module.inv_freq.copy_(frequencies)  # type: ignore[union-attr]
        module.original_inv_freq = frequencies.clone()  # type: ignore[union-attr]
        module.long_inv_freq = frequencies.clone()  # type: ignore[assignment]
