"""Shared-prompt attention over a packed sequence in which responses share their prompt.

It is exact in forward and backward.
"""

from pa_npu.attention.forms import shared_prompt_attention
from pa_npu.attention.layout import PrefixLayout

__all__ = ["PrefixLayout", "shared_prompt_attention"]
