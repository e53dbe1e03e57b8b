"""Rules for datasets, their templates, and what is left out of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pa_npu.config.texts import shown
from pa_npu.config.tree import ConfigTree

TEMPLATE_ENDING = ".jinja"
# What a template is rendered with by us, or says how it is rendered; no variables of it.
_RESERVED = frozenset(
    (
        *(
            "conversation",
            "messages",
            "chat_template",
            "add_generation_prompt",
            "continue_final_message",
            "tokenize",
            "padding",
        ),
        *(
            "truncation",
            "max_length",
            "return_tensors",
            "return_dict",
            "return_assistant_tokens_mask",
            "tokenizer_kwargs",
        ),
    )
)


def broken_data(c: ConfigTree) -> Iterator[str]:
    """One line per rule that is broken: keys, values, rule, remedy."""
    data = c.data
    for name, count in Counter(dataset.called for dataset in data.datasets).items():
        if count > 1:
            yield f"data.train: {count} datasets are called {name}; give each a name of its own"
    if data.chat_template not in ("auto", "always", "never") and not data.chat_template.endswith(TEMPLATE_ENDING):
        yield (
            f"data.chat_template: {shown(data.chat_template)} is not auto, always, never or a file's name that ends in "
            f"{TEMPLATE_ENDING}; use one of these"
        )
    for option in sorted(_RESERVED & set(data.template_options)):
        yield f"data.template_options: {option} says how a template is rendered and is no variable of it; remove it"
