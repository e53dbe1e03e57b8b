"""The bodies of the API's requests and answers, as docs/services.md describes them. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
WaitS = Annotated[float, msgspec.Meta(ge=0, le=60)]


class PutPrompts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """prompts: rows as in a dataset's file. samples: of each; none is rollout.responses_per_prompt."""

    prompts: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=1024)]
    samples: Count | None = None


class TakeGroups(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    task: Name
    columns: tuple[Name, ...]
    source: Literal["prompts", "run"] = "prompts"
    policy: Literal["order", "age", "balanced"] = "order"
    consumer: Annotated[int, msgspec.Meta(ge=0, le=1023)] = 0
    most: Count = 8
    wait_s: WaitS = 0.0


class TakeWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    most: Count = 1
    wait_s: WaitS = 0.0


class WrittenSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """tokens: behind the prompt. logprobs: one each. version: of the weights that wrote them. reward: none leaves it to the run's
    reward functions."""

    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]], msgspec.Meta(min_length=1)]
    logprobs: list[float]
    version: int
    text: str = ""
    finished: bool = True
    reward: float | None = None


class PutSamples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    samples: Annotated[list[WrittenSample], msgspec.Meta(min_length=1, max_length=1024)]


class PauseFor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    for_s: float
