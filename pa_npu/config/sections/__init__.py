"""The keys of the configuration: one class per section, one sentence per key, with default and bounds.

Unknown keys are refused. Rules between keys are in `pa_npu.config.rules`.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all sections: immutable, and no key is accepted and ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
