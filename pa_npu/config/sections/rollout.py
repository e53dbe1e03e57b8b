"""Keys of how samples come about: engines, environments, rewards."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from pa_npu.config.sections.base import Section

SLOWEST_TOKEN_S = 0.25
"""An engine that takes longer per token of a response than this, on top of its deadline, is not worth waiting for."""


class EngineSettings(Section):
    """Settings of single engines of a run."""

    engines: tuple[Annotated[int, Field(ge=0, le=2**14)], ...] = Field(
        ...,
        min_length=1,
        description="Numbers of the engines, from 0 in the order of rollout.attach, or in which the run starts them.",
    )
    window: int | None = Field(
        None, ge=1, description="Sequences in flight on each of them, in place of rollout.window; none goes by that."
    )
    speed: float = Field(
        1.0,
        ge=0.05,
        le=20.0,
        description="How fast each is expected to be beside an engine of 1; it holds until iterations have shown their speed.",
    )
    device: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="What each runs on, for records and reports, such as `npu 910B`. Attached engines whose first word is another "
        "of npu, cuda and cpu than run.device get weights through host memory.",
    )

    @property
    def device_kind(self) -> str | None:
        """npu, cuda or cpu, where `device` begins with one of them."""
        words = (self.device or "").lower().split()
        return words[0] if words and words[0] in ("npu", "cuda", "cpu") else None


class RolloutConfig(Section):
    short_forms: ClassVar[dict[str, str]] = {"engines": r"\s*(\d{1,9})\s*\.\.\s*(\d{1,9})\s*"}

    backend: str = Field(
        "vllm",
        min_length=1,
        description="Kind of engine: vllm; transformers (slow, exact, for debugging); or module:NAME, an EngineKind of your own.",
    )
    engines: int = Field(
        1,
        ge=1,
        le=2**14,
        description="Number of engines (servers); auto goes by prediction (docs/plan.md). MIN..MAX starts MIN, and up to MAX "
        "where a cluster's nodes have free devices (placement.cluster=ray); it is short for engines=MIN and max_engines=MAX.",
    )
    max_engines: int | None = Field(
        None,
        ge=1,
        description="Engines that the run grows to as nodes with free devices appear; none stays at engines.",
    )
    attach: tuple[str, ...] = Field(
        (),
        description="URLs of running engines (see `pa-npu engines`) to use instead of starting any; they must serve "
        "this model.path, one for each of rollout.engines.",
    )
    key_file: str | None = Field(
        None,
        min_length=1,
        description="File with the API key of attached engines, which `pa-npu engines` names; none means VLLM_API_KEY of "
        "the environment.",
    )
    engine_settings: tuple[EngineSettings, ...] = Field(
        (),
        description="What is particular to some of the engines, such as [{engines: [1, 2], speed: 0.5}]; engines that no "
        "entry names are alike.",
    )
    tensor_parallel: int = Field(1, ge=1, le=1024, description="Devices per engine; auto goes by prediction.")
    python: str | None = Field(None, description="Interpreter of the engines' own environment; none means this one.")
    responses_per_prompt: int = Field(8, ge=2, description="G, the number of responses per prompt (one group).")
    max_response_tokens: int = Field(256, ge=1, description="Longest response in tokens.")
    temperature: float = Field(1.0, gt=0.0, le=10.0, description="Sampling temperature; the trainer applies the same.")
    ignore_eos: bool = Field(False, description="Always generate max_response_tokens (benchmarks with fixed work).")
    window: Literal["auto"] | int = Field(
        "auto",
        description="Sequences in flight per engine; auto chooses them for each iteration, with turns and order of dispatch, by "
        "predicting it with what was learned of engines, trainers and lengths.",
    )
    max_num_batched_tokens: int = Field(
        32768, ge=1, description="vLLM's token budget per step; no prompt may be chunked."
    )
    max_num_seqs: int = Field(
        256,
        ge=1,
        description="Most sequences that an engine decodes together. Where it is not given, the run doubles it to 512 or 1024 if "
        "the KV cache holds so many at their longest and an iteration has them.",
    )
    memory_fraction: float = Field(
        0.85, gt=0.0, le=1.0, description="Share of device memory an engine may take (npu, cuda)."
    )
    shared_memory_fraction: float = Field(
        0.3,
        gt=0.0,
        le=1.0,
        description="Share of device memory that an engine on a trainer's device may take beside it (npu, cuda).",
    )
    sleep: bool | None = Field(
        None,
        description="Engines on trainers' devices give their memory back while these train, and get it and new weights at the next "
        "border; none: where they can (vllm on npu and cuda).",
    )
    kv_cache_gib: float = Field(1.0, gt=0.0, le=1e6, description="KV cache of an engine in GiB (cpu).")
    graph_mode: bool | None = Field(
        None,
        description="Let engines compile and capture graphs; false computes eagerly; none goes by the engine: graphs of "
        "decode steps with vllm-ascend 0.23, else eagerly.",
    )
    prefix_caching: bool = Field(
        True, description="Keep prompts' keys and values for the other responses of their group."
    )
    batch_invariant: bool = Field(
        False, description="Engine kernels whose results do not depend on what else is in the batch; slower."
    )
    request_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Deadline of one group's generation. An engine that works is given 0.25 s more per token of "
        "rollout.max_response_tokens; one that does not is replaced.",
    )
    startup_timeout_s: float = Field(600.0, gt=0, description="Deadline for an engine to become ready.")
    probe_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Deadline of a probe, a token that a serving engine must generate; one that does not is taken for hung and "
        "replaced. Engines are probed twice in that time.",
    )
    restarts: int = Field(
        3,
        ge=0,
        description="How often each engine that ends or hangs is started again within an hour; beyond that the run goes "
        "on without it where others serve.",
    )
    extra_args: tuple[str, ...] = Field((), description="Further arguments for the vLLM server.")
    env: dict[str, str] = Field(default_factory=dict, description="Further environment variables for the engines.")

    @model_validator(mode="before")
    @classmethod
    def split_range(cls, section: Any) -> Any:
        """engines=MIN..MAX as the two keys that it is short for."""
        if not isinstance(section, dict) or not isinstance(section.get("engines"), str):
            return section
        if not (found := re.fullmatch(cls.short_forms["engines"], section["engines"])):
            return section
        if section.get("max_engines") is not None:
            raise ValueError(f"engines: {section['engines']} names the maximum; remove max_engines")
        return {**section, "engines": int(found[1]), "max_engines": int(found[2])}

    def settings_of(self, index: int) -> EngineSettings:
        """Returns the settings of engine `index`; the usual ones if no entry names it."""
        found = (entry for entry in self.engine_settings if index in entry.engines)
        return next(found, None) or EngineSettings(engines=(index,))


class EnvironmentConfig(Section):
    name: str = Field(
        "single_turn",
        min_length=1,
        description="How a prompt becomes samples: single_turn, tools (several turns with a tool), agents (programs that call the "
        "run's gateway, docs/agents.md), remote (a server with reset and step), or a class of your own, module:Class.",
    )
    max_turns: int = Field(4, ge=1, le=1000, description="Most turns of the policy in one sample.")
    timeout_s: float = Field(
        10.0, gt=0, description="Time limit of the environment's own work in one turn, such as a tool's."
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="What the environment reads itself; see its docstring, e.g. pa_npu.environments.tools.",
    )


class RewardFunction(Section):
    name: str = Field(
        ..., min_length=1, description="math, format, overlong, judge, code, or module:function of your own."
    )
    weight: float = Field(1.0, description="Factor of this reward in the sum.")
    pattern: str | None = Field(None, description="Regular expression a response must match (format only).")
    max_tokens: int | None = Field(
        None, ge=1, description="Length with reward -1 (overlong only); null means rollout.max_response_tokens."
    )
    buffer_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens before max_tokens over which the reward falls from 0 to -1 (overlong only); null means a fifth.",
    )


LONGEST_JUDGE_PAUSE_S = 30.0
"""Between two requests for one score, however often they failed and whatever the server asked for."""


class JudgeConfig(Section):
    url: str | None = Field(
        None, description="Base URL of the judge's OpenAI-compatible server, such as http://HOST:PORT/v1."
    )
    model: str | None = Field(None, min_length=1, description="Name of the model that judges, as its server knows it.")
    api: Literal["chat", "pooling"] = Field(
        "chat",
        description="chat: the model is asked in words and its answer read (template, score_pattern). pooling: a reward model "
        "gives the number itself (vLLM's /pooling beside /v1).",
    )
    api_key_variable: str | None = Field(
        None, min_length=1, description="Environment variable that holds the server's key; none sends no key."
    )
    system: str | None = Field(None, description="System message to the judge.")
    template: str = Field(
        "Grade a response to a task.\n\nTask:\n{prompt}\n\nReference answer:\n{answer}\n\nResponse:\n{response}\n\n"
        "Explain briefly how good the response is, then end with a line 'Score: N', where N is from {lowest} to {highest}.",
        description="What the judge is asked: {prompt}, {answer}, {response}, {lowest}, {highest} and {row.COLUMN} are filled in.",
    )
    score_pattern: str = Field(
        r"[Ss]core\W{0,5}(-?\d+(?:\.\d+)?)",
        description="Regular expression whose group is the score; its last match in the judge's answer counts.",
    )
    lowest: float = Field(0.0, description="The score that is reward 0.")
    highest: float = Field(10.0, description="The score that is reward 1.")
    temperature: float = Field(0.0, ge=0, description="Temperature of the judge.")
    max_tokens: int = Field(512, ge=1, description="Longest answer of the judge in tokens.")
    concurrency: int = Field(16, ge=1, le=1024, description="Requests to the judge at once.")
    timeout_s: float = Field(60.0, gt=0, description="Deadline of one request.")
    attempts: int = Field(4, ge=1, le=100, description="Requests for one score, at growing intervals.")
    on_failure: Literal["end", "neutral"] = Field(
        "end",
        description="A response without a score after all attempts: end ends the run; neutral gives it the mean of its group's "
        "others, so that it is neither rewarded nor punished. Counted in the record either way.",
    )
    cache: bool = Field(True, description="Keep scores in run.dir/judge_scores.sqlite, by the content of the request.")


class CodeConfig(Section):
    tests: str = Field("tests", min_length=1, description="Column with the tests; docs/rewards.md has the layouts.")
    score: Literal["all", "share"] = Field(
        "all", description="Reward 1 where all tests pass and else 0; or the share of tests that pass."
    )
    most_tests: int = Field(32, ge=1, description="Tests of a row that are run, the first ones.")
    timeout_s: float = Field(10.0, gt=0, description="Wall and processor time of one run of a program.")
    memory_mib: int = Field(
        1024, ge=16, description="Address space of each of a program's processes, and what all of them hold."
    )
    concurrency: int = Field(2, ge=1, le=1024, description="Programs at once.")
    require: Literal["limits", "files", "namespaces"] = Field(
        "limits",
        description="Least isolation of programs, else the run is refused. limits: those of a process. files: also no network, and "
        "no files but its own. namespaces: also nothing else of the machine, and no rights in it.",
    )


class RewardConfig(Section):
    functions: tuple[RewardFunction, ...] = Field(
        (RewardFunction(name="math"),),
        min_length=1,
        description="Reward functions; a response's reward is their weighted sum.",
    )
    judge: JudgeConfig = Field(JudgeConfig(), description="The judge of the function `judge`.")
    code: CodeConfig = Field(CodeConfig(), description="How the function `code` runs programs.")
    timeout_s: float = Field(
        10.0,
        gt=0,
        description="Time limit of functions for one group; then its reward is zero, logged. judge and code have limits of their "
        "own.",
    )
    max_failing_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="End the run when one function failed for more than this share of the last 64 groups; 1 never ends it.",
    )
    workers: int = Field(1, ge=1, le=256, description="Processes that compute rewards.")
