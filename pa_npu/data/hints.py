"""Hints: what the policy is shown beside a row's question to be its own teacher (teacher.NAME.hint_column)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pa_npu.config.schema import Config
from pa_npu.data.records import Record, named_column
from pa_npu.errors import DataError


@dataclass(frozen=True)
class Hint:
    """teacher: its name. column: of the row. text: with {hint} in it. max_tokens: of the prompt with
    its hint. teacher_column: data.teacher_column; only rows that name the teacher have the hint.
    """

    teacher: str
    column: str
    text: str
    max_tokens: int
    teacher_column: str | None

    def is_for(self, record: Record) -> bool:
        return self.teacher_column is None or record.row.get(self.teacher_column) == self.teacher

    def shown_with(self, record: Record) -> Record:
        """Returns the record with the hint behind the user's last message.

        Raises DataError for a row without the hint, or without a message of the user's.
        """
        key = f"teacher.{self.teacher}.hint_column"
        value = named_column(record.location, record.row, key, self.column, optional=True)
        if not isinstance(value, str) or not value.strip():
            raise DataError(
                f"{record.location}: no text in {self.column}, which {key} names; correct the row "
                "or the key"
            )
        messages = [dict(message) for message in record.messages]
        asked = [message for message in messages if message["role"] == "user"]
        if not asked:
            raise DataError(
                f"{record.location}: no message of role user to put {key} after; correct the row"
            )
        asked[-1]["content"] += "\n" + self.text.replace("{hint}", value)
        return replace(record, messages=tuple(messages))


def hints_of(config: Config) -> tuple[Hint, ...]:
    """Returns the hints of the run's teachers."""
    hints = []
    for name, teacher in config.teacher.items():
        if teacher.hint_column is not None:
            hint = Hint(
                teacher=name,
                column=teacher.hint_column,
                text=teacher.hint_text,
                max_tokens=config.hinted_prompt_tokens(teacher),
                teacher_column=config.data.teacher_column,
            )
            hints.append(hint)
    return tuple(hints)
