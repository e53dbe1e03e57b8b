"""Shared-prompt attention: a packed sequence in which responses share their prompt, exact in forward and backward."""

from pa_npu.attention.layout import PrefixLayout
from pa_npu.attention.shared_prompt import shared_prompt_attention

__all__ = ["PrefixLayout", "shared_prompt_attention"]
