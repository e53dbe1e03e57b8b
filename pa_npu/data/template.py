"""Which variables a chat template reads, so that an option that it does not know is refused instead of ignored."""

from __future__ import annotations

from typing import Any

# What every rendering gives it.
_GIVEN = frozenset({"messages", "add_generation_prompt", "raise_exception", "strftime_now", "bos_token", "eos_token"})
_SPECIAL = "_token"  # pad_token, unk_token and others are the tokenizer's


def template_variables(template: Any) -> set[str] | None:
    """Names that a user may set; None where that cannot be told: several templates, or tags that are not jinja's."""
    import jinja2
    import jinja2.meta

    if not isinstance(template, str):
        return None
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    try:
        found = jinja2.meta.find_undeclared_variables(environment.parse(template))
    except (jinja2.TemplateError, RecursionError):
        return None  # rendering says what is wrong with it, if anything is
    return {name for name in found - _GIVEN if not name.endswith(_SPECIAL)}
