"""Keys of rewards: functions, judge, tested code."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pa_npu.config.sections import Section, Several

MAX_REWARD = 1e15
"""Largest magnitude of a reward, a weight or a sum of rewards. Its square still fits into float32,
in which trainers compute.
"""


class RewardFunction(Section):
    name: str = Field(
        ...,
        min_length=1,
        description="math, format, overlong, judge, code, reasoning_gym, or module:function of "
        "your own.",
    )
    weight: float = Field(
        1.0,
        ge=-MAX_REWARD,
        le=MAX_REWARD,
        description="Factor of this reward in the sum of all rewards.",
    )
    pattern: str | None = Field(
        None, description="Regular expression that a response must match (format only)."
    )
    buffer_tokens: int | None = Field(
        None,
        ge=1,
        description="Number of tokens before rollout.max_response_tokens over which the reward "
        "falls from 0 to -1 (overlong only). null means a fifth of "
        "rollout.max_response_tokens.",
    )


JUDGE_KEY_VARIABLE = "JUDGE_API_KEY"
"""Environment variable with the key of the judge's server. Without it requests carry no key."""
JUDGE_ATTEMPTS = 4
"""Number of requests for one score, at growing intervals, so that a server may restart within a
minute.
"""
LONGEST_JUDGE_PAUSE_S = 30.0
"""Longest pause between two requests for one score, also if the server asks for a longer one."""


class JudgeConfig(Section):
    url: str | None = Field(
        None,
        description="Base URL of the judge's OpenAI-compatible server, such as "
        "http://HOST:PORT/v1. Its key is read from the environment variable "
        "JUDGE_API_KEY.",
    )
    model: str | None = Field(
        None, min_length=1, description="Name of the judging model on that server."
    )
    api: Literal["chat", "pooling"] = Field(
        "chat",
        description="chat asks the model in words and reads the score from its answer (template, "
        "score_pattern). pooling takes the number that a reward model returns (vLLM's "
        "/pooling beside /v1).",
    )
    template: str = Field(
        "Grade a response to a task.\n\nTask:\n{prompt}\n\nReference "
        "answer:\n{answer}\n\nResponse:\n{response}\n\n"
        "Explain briefly how good the response is, then end with a line 'Score: N', where N is "
        "from {lowest} to {highest}.",
        description="Text that the judge is asked. {prompt}, {answer}, {response}, {lowest}, "
        "{highest} and {row.COLUMN} are filled in.",
    )
    score_pattern: str = Field(
        r"[Ss]core\W{0,5}(-?\d+(?:\.\d+)?)",
        description="Regular expression whose group is the score. Its last match in the judge's "
        "answer counts.",
    )
    scores: tuple[float, float] = Field(
        (0.0, 10.0),
        strict=False,
        description="The score that gives reward 0, and the score that gives reward 1.",
    )
    request: dict[str, Any] = Field(
        {"temperature": 0.0, "max_tokens": 512},
        description="Further fields of each request, as the server takes them, beside model and "
        "messages (chat only).",
    )
    concurrency: int = Field(
        16, ge=1, le=1024, description="Maximum number of requests to the judge at once."
    )
    timeout_s: float = Field(60.0, gt=0, description="Deadline of one request.")
    on_failure: Literal["end", "neutral"] = Field(
        "end",
        description="What happens to a response that has no score after four requests. end ends "
        "the run. neutral gives it the mean of the other responses of its group, so "
        "that it is neither rewarded nor punished. The record counts both.",
    )


STARVED_FACTOR = 10
"""A reward function of the user's is ended after this multiple of reward.timeout_s of wall-clock
time, however busy the machine is.
"""
RESPONSE_CPU_S = 5.0
"""Limit of the processor time of `math` or `format` per response, comparisons excluded. Usually
they take milliseconds.
"""
COMPARED_CPU_S = 2.0
"""Limit of the processor time of one comparison by math-verify. Equal answers took at most 0.3 s on
a core of 2020.
"""
MAX_COMPARISONS = 4
"""Maximum number of comparisons by math-verify that `math` makes for a response."""
MOST_TESTS = 32
"""Maximum number of tests of a row that are run, from the first on. Each may take
reward.code.timeout_s, and trainers wait for all of them.
"""


class CodeConfig(Section):
    tests: str = Field(
        "tests",
        min_length=1,
        description="Column with the tests; a.b is column b inside column a "
        "(reward_model.ground_truth). docs/rewards.md lists the layouts.",
    )
    score: Literal["all", "share"] = Field(
        "all",
        description="all gives reward 1 if every test passes, otherwise 0. share gives the share "
        "of tests that pass.",
    )
    timeout_s: float = Field(
        10.0,
        gt=0,
        description="Limit of wall-clock time, and of processor time, of one run of a program.",
    )
    memory_mib: int = Field(
        1024,
        ge=16,
        description="Limit of the address space of each process of a program, and of the memory "
        "that all of them hold, in MiB.",
    )
    require: Literal["limits", "files", "namespaces"] = Field(
        "limits",
        description="Weakest isolation of programs that the run accepts. limits: resource limits "
        "of a process. files: in addition no network, no files but its own and no "
        "other process. namespaces: in addition nothing else of the machine and no "
        "privileges on it.",
    )


class RewardConfig(Section):
    functions: Several[RewardFunction] = Field(
        (RewardFunction(name="math"),),
        min_length=1,
        description="Reward functions. The reward of a response is their weighted sum. If unset, "
        "math; reasoning_gym where data.train names its tasks.",
    )
    judge: JudgeConfig = Field(JudgeConfig(), description="The judge of the function `judge`.")
    code: CodeConfig = Field(CodeConfig(), description="How the function `code` runs programs.")
    timeout_s: float = Field(
        10.0,
        gt=0,
        description="Time limit of a function of your own for one group. When it is exceeded the "
        "reward is zero and the log says so. Time spent waiting for a processor on a "
        "busy machine does not count, up to ten times the limit. The built-in "
        "functions have limits of their own.",
    )
    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="Number of processes that compute rewards. The function code runs twice as "
        "many programs at once.",
    )

    @property
    def reads_answers(self) -> bool:
        """Returns whether a reward may compare responses with a reference answer."""
        judge_reads_answer = "{answer}" in self.judge.template
        return any(
            function.name == "math"
            or ":" in function.name
            or (function.name == "judge" and judge_reads_answer)
            for function in self.functions
        )

    @property
    def programs(self) -> int:
        """Returns how many programs of `code` run at once. There are more than workers, because
        programs also wait for their start and for time limits.
        """
        return 2 * self.workers
