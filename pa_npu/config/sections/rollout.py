"""Keys of how samples come about: engines, environments, agents, rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pa_npu.config.sections import FilePath, Section, Several

SLOWEST_TOKEN_S = 0.25
"""An engine that takes longer per token of a response than this, on top of its deadline, is not
worth waiting for.
"""


class EngineSettings(Section):
    """Settings of single engines of a run."""

    engines: Several[Annotated[int, Field(ge=0, le=2**14)]] = Field(
        ...,
        min_length=1,
        description="Numbers of the engines, from 0 in the order of rollout.attach, or in which "
        "the run starts them.",
    )
    window: int | None = Field(
        None,
        ge=1,
        description="Sequences in flight on each of them, in place of rollout.window; none goes by "
        "that.",
    )
    speed: float = Field(
        1.0,
        ge=0.05,
        le=20.0,
        description="How fast each is expected to be beside an engine of 1; it holds until "
        "iterations have shown their speed.",
    )
    device: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="What each runs on, for records and reports, such as `npu 910B`. Attached "
        "engines whose first word is another of npu, cuda and cpu than run.device get "
        "weights through host memory.",
    )

    @property
    def device_kind(self) -> str | None:
        """npu, cuda or cpu, where `device` begins with one of them."""
        words = (self.device or "").lower().split()
        return words[0] if words and words[0] in ("npu", "cuda", "cpu") else None


class RolloutConfig(Section):
    backend: str = Field(
        "vllm",
        min_length=1,
        description="Kind of engine: vllm; transformers (slow, exact, for debugging); or "
        "module:NAME, an EngineKind of your own.",
    )
    engines: int = Field(
        1,
        ge=0,
        le=2**14,
        description="Number of engines (servers) that the run starts with; auto goes by prediction "
        "(docs/plan.md). 0 where samples are rows of data and nothing is generated.",
    )
    max_engines: int | None = Field(
        None,
        ge=1,
        description="Engines that the run grows to as nodes of a cluster with free devices appear "
        "(placement.cluster=ray); none stays at engines.",
    )
    attach: Several[str] = Field(
        (),
        description="URLs of running engines (see `pa-npu engines`) to use instead of starting "
        "any; they must serve this model.path, one for each of rollout.engines, and "
        "take the key in the variable VLLM_API_KEY.",
    )
    engine_settings: Several[EngineSettings] = Field(
        (),
        description="What is particular to some of the engines, such as [{engines: [1, 2], speed: "
        "0.5}]; engines that no entry names are alike.",
    )
    tensor_parallel: int = Field(
        1, ge=1, le=1024, description="Devices per engine; auto goes by prediction."
    )
    python: FilePath | None = Field(
        None, description="Interpreter of the engines' own environment; none means this one."
    )
    responses_per_prompt: int = Field(
        8, ge=2, description="G, the number of responses per prompt (one group)."
    )
    max_response_tokens: int = Field(256, ge=1, description="Longest response in tokens.")
    temperature: float = Field(
        1.0, gt=0.0, le=10.0, description="Sampling temperature; the trainer applies the same."
    )
    ignore_eos: bool = Field(
        False, description="Always generate max_response_tokens (benchmarks with fixed work)."
    )
    window: Literal["auto"] | int = Field(
        "auto",
        description="Sequences in flight per engine; auto chooses them for each iteration, with "
        "turns and order of dispatch, by predicting it with what was learned of "
        "engines, trainers and lengths.",
    )
    max_num_batched_tokens: int = Field(
        32768, ge=1, description="vLLM's token budget per step; no prompt may be chunked."
    )
    max_num_seqs: int = Field(
        256,
        ge=1,
        description="Most sequences that an engine decodes together. Where it is not given, the "
        "run doubles it to 512 or 1024 if the KV cache holds so many at their longest "
        "and an iteration has them.",
    )
    memory_fraction: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="Share of device memory that an engine may take (npu, cuda). None is 0.85; on "
        "a trainer's device 0.3, or where engines sleep what its trainer leaves as it "
        "decodes.",
    )
    sleep: bool | None = Field(
        None,
        description="Engines on trainers' devices give their memory back while these train, and "
        "get it and new weights at the next border; none: where they can (vllm on npu "
        "and cuda).",
    )
    kv_cache_gib: float = Field(
        1.0, gt=0.0, le=1e6, description="KV cache of an engine in GiB (cpu)."
    )
    graph_mode: bool | None = Field(
        None,
        description="Let engines compile and capture graphs; false computes eagerly; none goes by "
        "the engine: graphs of decode steps with vllm-ascend 0.23, else eagerly.",
    )
    batch_invariant: bool = Field(
        False,
        description="Engine kernels whose results do not depend on what else is in the batch; "
        "slower.",
    )
    request_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Deadline of one group's generation. An engine that works is given 0.25 s more "
        "per token of rollout.max_response_tokens; one that does not is replaced.",
    )
    probe_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Deadline of a probe, a token that a serving engine must generate; one that "
        "does not is taken for hung and replaced. Engines are probed twice in that "
        "time.",
    )
    extra_args: Several[str] = Field((), description="Further arguments for the vLLM server.")
    env: dict[str, str] = Field(
        default_factory=dict, description="Further environment variables for the engines."
    )

    def settings_of(self, index: int) -> EngineSettings:
        """Returns the settings of engine `index`; the usual ones if no entry names it."""
        found = (entry for entry in self.engine_settings if index in entry.engines)
        return next(found, None) or EngineSettings(engines=(index,))


class EnvironmentConfig(Section):
    name: str = Field(
        "single_turn",
        min_length=1,
        description="How a prompt becomes samples: single_turn, tools (several turns with a tool), "
        "agents (programs that call the run's gateway, docs/agents.md), remote (a "
        "server with reset and step), or a class of your own, module:Class.",
    )
    max_turns: int = Field(4, ge=1, le=1000, description="Most turns of the policy in one sample.")
    timeout_s: float | None = Field(
        None,
        gt=0,
        description="Time limit of the environment's own work in one turn, such as a tool's; none "
        "means 10. Of agents, of a session from when an agent has it, the policy's "
        "answers included, after which it ends with the outcome time; none means 600. "
        "A run in which no task is taken for a minute longer ends.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="What the environment reads itself; see its docstring, e.g. "
        "pa_npu.environments.tools.",
    )


MAX_REWARD = 1e15
"""Largest magnitude of a reward, a weight and their sum: squares of it still fit into float32, in
which trainers compute.
"""


class RewardFunction(Section):
    name: str = Field(
        ...,
        min_length=1,
        description="math, format, overlong, judge, code, or module:function of your own.",
    )
    weight: float = Field(
        1.0, ge=-MAX_REWARD, le=MAX_REWARD, description="Factor of this reward in the sum."
    )
    pattern: str | None = Field(
        None, description="Regular expression a response must match (format only)."
    )
    buffer_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens before rollout.max_response_tokens over which the reward falls from 0 "
        "to -1 (overlong only); null means a fifth of that.",
    )


JUDGE_KEY_VARIABLE = "JUDGE_API_KEY"
"""Holds the key of the judge's server; without it requests have none."""
JUDGE_ATTEMPTS = 4
"""Requests for one score, at growing intervals: a server that restarts within a minute costs
nothing.
"""
LONGEST_JUDGE_PAUSE_S = 30.0
"""Between two requests for one score, however often they failed and whatever the server asked for.
"""


class JudgeConfig(Section):
    url: str | None = Field(
        None,
        description="Base URL of the judge's OpenAI-compatible server, such as "
        "http://HOST:PORT/v1; its key is in the environment, as JUDGE_API_KEY.",
    )
    model: str | None = Field(
        None, min_length=1, description="Name of the model that judges, as its server knows it."
    )
    api: Literal["chat", "pooling"] = Field(
        "chat",
        description="chat: the model is asked in words and its answer read (template, "
        "score_pattern). pooling: a reward model gives the number itself (vLLM's "
        "/pooling beside /v1).",
    )
    template: str = Field(
        "Grade a response to a task.\n\nTask:\n{prompt}\n\nReference "
        "answer:\n{answer}\n\nResponse:\n{response}\n\n"
        "Explain briefly how good the response is, then end with a line 'Score: N', where N is "
        "from {lowest} to {highest}.",
        description="What the judge is asked: {prompt}, {answer}, {response}, {lowest}, {highest} "
        "and {row.COLUMN} are filled in.",
    )
    score_pattern: str = Field(
        r"[Ss]core\W{0,5}(-?\d+(?:\.\d+)?)",
        description="Regular expression whose group is the score; its last match in the judge's "
        "answer counts.",
    )
    scores: tuple[float, float] = Field(
        (0.0, 10.0),
        strict=False,
        description="The score that is reward 0, and the score that is reward 1.",
    )
    request: dict[str, Any] = Field(
        {"temperature": 0.0, "max_tokens": 512},
        description="Fields of each request beside its model and messages, as the server takes "
        "them (chat only).",
    )
    concurrency: int = Field(16, ge=1, le=1024, description="Requests to the judge at once.")
    timeout_s: float = Field(60.0, gt=0, description="Deadline of one request.")
    on_failure: Literal["end", "neutral"] = Field(
        "end",
        description="A response without a score after four requests: end ends the run; neutral "
        "gives it the mean of its group's others, so that it is neither rewarded nor "
        "punished. Counted in the record either way.",
    )


STARVED_FACTOR = 10
"""A function of a user's ends at so many times reward.timeout_s of wall clock, however busy the
machine is.
"""
RESPONSE_CPU_S = 5.0
"""Processor time of `math` or `format` for a response, beside that of comparisons; usual are
milliseconds.
"""
COMPARED_CPU_S = 2.0
"""Processor time of one comparison by math-verify; what is equal is found within 0.3 s on one core
of 2020.
"""
MAX_COMPARISONS = 4
"""Comparisons by math-verify that `math` makes for a response, at most."""
MOST_TESTS = 32
"""Tests of a row that are run, the first ones: each may take reward.code.timeout_s, and the
trainers wait for all.
"""


class CodeConfig(Section):
    tests: str = Field(
        "tests",
        min_length=1,
        description="Column with the tests, dotted for one inside another "
        "(reward_model.ground_truth); docs/rewards.md has the layouts.",
    )
    score: Literal["all", "share"] = Field(
        "all",
        description="Reward 1 where all tests pass and else 0; or the share of tests that pass.",
    )
    timeout_s: float = Field(
        10.0, gt=0, description="Wall and processor time of one run of a program."
    )
    memory_mib: int = Field(
        1024,
        ge=16,
        description="Address space of each of a program's processes, and what all of them hold.",
    )
    require: Literal["limits", "files", "namespaces"] = Field(
        "limits",
        description="Least isolation of programs, else the run is refused. limits: those of a "
        "process. files: also no network, no files but its own, and no other process. "
        "namespaces: also nothing else of the machine, and no rights in it.",
    )


class RewardConfig(Section):
    functions: Several[RewardFunction] = Field(
        (RewardFunction(name="math"),),
        min_length=1,
        description="Reward functions; a response's reward is their weighted sum.",
    )
    judge: JudgeConfig = Field(JudgeConfig(), description="The judge of the function `judge`.")
    code: CodeConfig = Field(CodeConfig(), description="How the function `code` runs programs.")
    timeout_s: float = Field(
        10.0,
        gt=0,
        description="Time of a function of your own for one group; then its reward is zero, "
        "logged. What it waits for a processor on a busy machine does not count, up to "
        "ten times the limit. The built-in functions have limits of their own.",
    )
    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="Processes that compute rewards; of `code` twice as many programs run at once.",
    )

    @property
    def programs(self) -> int:
        """Programs of `code` at once: more than workers, since they also wait for their start and
        for a time limit.
        """
        return 2 * self.workers


Outcome = Literal["done", "turns", "tokens", "time", "output", "failed"]


class AgentConfig(Section):
    command: str | None = Field(
        None,
        min_length=1,
        description="Command line of the agent, run without a shell for one session: it has "
        "OPENAI_BASE_URL, OPENAI_API_KEY and TASK (JSON) in its environment and ends "
        "by itself. If unset, agents connect by themselves and take tasks.",
    )
    programs: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Programs that stay, and take one task after another from the gateway (GET "
        "/tasks), or several at once; none  starts one for every session.",
    )
    container: str | None = Field(
        None,
        pattern=r"^(--?[^\s]+\s+)*\w[\w.:/@-]*$",
        description="Image in which agent.command runs, by docker or podman, behind options of "
        "`docker run` such as --memory=8g, which has 4g, 2 CPUs and 512 processes "
        "otherwise; none runs it as a process of this machine.",
    )
    concurrent: int = Field(
        64, ge=1, le=4096, description="Sessions at once, open or offered to be taken."
    )
    output_kib: int = Field(
        1024,
        ge=1,
        description="Most that a program may write to its standard output and error, in KiB; then "
        "outcome output.",
    )
    discards: Several[Outcome] = Field(
        ("time", "output", "failed"),
        description="Sessions with these outcomes are not trained: time and output (limits above), "
        "failed (the program ended with an error), turns (environment.max_turns), "
        "tokens (rollout.max_response_tokens, data.max_prompt_tokens), done.",
    )
    tool_parser: str = Field(
        "auto",
        min_length=1,
        description="What finds tool calls in the policy's text: hermes, template (transformers' "
        "parse_response), or a parser of vLLM by its name there; auto is template "
        "where the tokenizer has one, else hermes.",
    )
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of the gateway at placement.host, also for other programs with the run's "
        "key (docs/agents.md); 0 takes a free one, which RUN/gateway.json names. "
        "Unset: with environment.name=agents the gateway listens on loopback; "
        "otherwise there is none.",
    )
