"""The number format in which this machine computes a bf16 checkpoint, such as the embedded pair's, without --dtype."""

from __future__ import annotations

import torch

from specsplit.model.processor import computes

DTYPE = "bf16" if computes(torch.bfloat16) else "fp32"
