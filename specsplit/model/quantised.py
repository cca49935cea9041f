"""Checkpoints that are quantised already: transformers dequantises some at load, the others are refused."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from specsplit.core.errors import MissingExtra, ModelUnsupported

_DEQUANTISED = ("mxfp4", "fp8")
"""Methods whose weights become ordinary ones at load."""


def refuse_quantised(config: Any) -> None:
    """Refuse a model whose config names a method that is not dequantised here.

    Raises:
        ModelUnsupported.
    """
    found = _settings(config)
    method = _method(found) if found is not None else None
    if found is not None and method not in _DEQUANTISED:
        raise ModelUnsupported(
            f"This {config.model_type} model is quantised already ({method or 'with no quant_method'}), which is not "
            "served; name the model that it was made from."
        )


def prepare_dequantising(config: Any, name: str) -> bool:
    """Have transformers dequantise the weights at load, on a GPU too; return whether they are quantised.

    Raises:
        MissingExtra: transformers needs a package for it.
    """
    found = _settings(config)
    if found is None:
        return False
    if _method(found) == "fp8" and find_spec("accelerate") is None:
        raise MissingExtra(f"{name} has FP8 weights, which are dequantised with accelerate: pip install accelerate.")
    found["dequantize"] = True  # transformers asks for accelerate for MXFP4 too, but only without this
    return True


def _settings(config: Any) -> dict[str, Any] | None:
    outer: dict[str, Any] | None = getattr(config, "quantization_config", None)
    return outer or getattr(config.get_text_config(), "quantization_config", None) or None


def _method(settings: dict[str, Any]) -> object:
    is_bitsandbytes = settings.get("load_in_8bit") or settings.get("load_in_4bit")  # whose older configs lack a method
    return "bitsandbytes" if is_bitsandbytes else settings.get("quant_method")
