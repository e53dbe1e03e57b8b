"""Keys of sampling: engines, environments, agents."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pa_npu.config.sections import FilePath, Section, Several

SLOWEST_TOKEN_S = 0.25
"""Time per token of a response that is added to rollout.request_timeout_s. A slower engine is
replaced.
"""


class EngineSettings(Section):
    """Settings of single engines of a run."""

    engines: Several[Annotated[int, Field(ge=0, le=2**14)]] = Field(
        ...,
        min_length=1,
        description="Numbers of the engines that these settings are for, from 0, in the order of "
        "rollout.attach or in the order in which the run starts them.",
    )
    window: int | None = Field(
        None,
        ge=1,
        description="Replaces rollout.window for these engines. null keeps it.",
    )
    speed: float = Field(
        1.0,
        ge=0.05,
        le=20.0,
        description="Expected speed of each relative to other engines. It is used until iterations "
        "have shown the real speed.",
    )
    device: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="Device of each engine for records and reports, such as `npu 910B`. If the "
        "first word is npu, cuda or cpu and not run.device, attached engines receive "
        "their weights through host memory.",
    )

    @property
    def device_kind(self) -> str | None:
        """Returns npu, cuda or cpu if `device` begins with one of them, otherwise None."""
        words = (self.device or "").lower().split()
        return words[0] if words and words[0] in ("npu", "cuda", "cpu") else None


class RolloutConfig(Section):
    backend: str = Field(
        "vllm",
        min_length=1,
        description="Kind of engine: vllm; transformers, which is slow and exact, for debugging; "
        "or module:NAME, an EngineKind of your own.",
    )
    engines: int = Field(
        1,
        ge=0,
        le=2**14,
        description="Number of engines (servers) that the run starts with. auto chooses by "
        "prediction (docs/plan.md). 0 where samples are rows of data and nothing is generated.",
    )
    max_engines: int | None = Field(
        None,
        ge=1,
        description="Number of engines up to which the run grows as nodes with free devices join "
        "the cluster (placement.cluster=ray). null stays at rollout.engines.",
    )
    attach: Several[str] = Field(
        (),
        description="URLs of running engines (see `pa-npu engines`) to use instead of starting "
        "any, as many as rollout.engines. They must serve this model.path and accept "
        "the key in the variable VLLM_API_KEY.",
    )
    engine_settings: Several[EngineSettings] = Field(
        (),
        description="Settings of some of the engines, such as [{engines: [1, 2], speed: 0.5}]. "
        "Engines that no entry names have the settings of this section.",
    )
    tensor_parallel: int = Field(
        1, ge=1, le=1024, description="Number of devices per engine. auto chooses by prediction."
    )
    python: FilePath | None = Field(
        None,
        description="Python interpreter of the engines, if they have an environment of their own. "
        "null means the run's.",
    )
    responses_per_prompt: int = Field(
        8, ge=2, description="G, the number of responses per prompt (one group)."
    )
    max_response_tokens: int = Field(
        256, ge=1, description="Maximum length of a response in tokens."
    )
    temperature: float = Field(
        1.0, gt=0.0, le=10.0, description="Sampling temperature. The trainer applies the same."
    )
    ignore_eos: bool = Field(
        False,
        description="Always generate max_response_tokens tokens, for benchmarks with a fixed "
        "amount of work.",
    )
    window: Literal["auto"] | int = Field(
        "auto",
        description="Number of sequences in flight per engine. auto chooses it for each iteration, "
        "together with turns and the order of dispatch, by a prediction from the "
        "measured speed of engines and trainers and the measured lengths.",
    )
    max_num_batched_tokens: int = Field(
        32768,
        ge=1,
        description="vLLM's token budget per step. It must hold a whole prompt, since prompts are "
        "not chunked.",
    )
    max_num_seqs: int = Field(
        256,
        ge=1,
        description="Maximum number of sequences that an engine decodes together. If it is unset, "
        "the run raises it to 512 or 1024 when an iteration has that many sequences "
        "and the KV cache holds them at their maximum length.",
    )
    memory_fraction: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="Share of device memory that an engine may take (npu and cuda). null means "
        "0.85. On a trainer's device it means 0.3, or, if engines sleep, what the "
        "trainer leaves free while they decode.",
    )
    sleep: bool | None = Field(
        None,
        description="Engines on trainers' devices free their memory while the trainers work, and "
        "take it again, with new weights, at the next border. null does so where the "
        "engine can (vllm on npu and cuda).",
    )
    kv_cache_gib: float = Field(
        1.0, gt=0.0, le=1e6, description="Size of an engine's KV cache in GiB (cpu only)."
    )
    graph_mode: bool | None = Field(
        None,
        description="true lets engines compile and capture graphs; false computes eagerly. null "
        "captures decode steps with vllm-ascend 0.23 and computes eagerly with other "
        "engines.",
    )
    statistics: bool | None = Field(
        None,
        description="true lets vLLM engines count each step for their /metrics; it takes a core a "
        "tenth of a step. null: true on devices, false on cpu.",
    )
    batch_invariant: bool = Field(
        False,
        description="Use engine kernels whose results do not depend on what else is in the batch. "
        "They are slower.",
    )
    request_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Deadline for generating one group. An engine that still generates gets "
        "another 0.25 s per token of rollout.max_response_tokens; one that does not is "
        "replaced.",
    )
    probe_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Deadline of a health probe, for which a serving engine must generate one "
        "token. Engines are probed twice within this time. An engine that misses the "
        "deadline counts as hung and is replaced.",
    )
    extra_args: Several[str] = Field((), description="Further arguments of the vLLM server.")
    env: dict[str, str] = Field(
        default_factory=dict, description="Further environment variables of the engines."
    )

    @property
    def has_engines(self) -> bool:
        """Returns whether anything writes tokens for the run.

        Without engines none is started, planned, published to or waited for, and samples are rows
        of data.
        """
        return self.engines > 0

    def settings_of(self, index: int) -> EngineSettings:
        """Returns the settings of engine `index`, or the defaults if no entry names it."""
        for entry in self.engine_settings:
            if index in entry.engines:
                return entry
        return EngineSettings(engines=(index,))


class EnvironmentConfig(Section):
    name: str = Field(
        "single_turn",
        min_length=1,
        description="How a prompt becomes samples: single_turn; tools (several turns with a tool); "
        "agents (programs that call the run's gateway, docs/agents.md); remote (a "
        "server with reset and step); tool_class (a class whose methods are tools, TRL's "
        "environment_factory); verifiers (its tasksets, harnesses and rewards); or module:Class, a "
        "class of your own.",
    )
    max_turns: int = Field(
        4, ge=1, le=1000, description="Maximum number of the policy's turns in one sample."
    )
    timeout_s: float | None = Field(
        None,
        gt=0,
        description="Time limit of the environment's own work in one turn, such as a tool call; "
        "null means 10. With agents it is the time limit of a whole session, the "
        "policy's answers included, from the moment when an agent takes it; null means "
        "600. A session that exceeds it ends with the outcome time. A run ends if no "
        "agent takes a task for a minute longer than that.",
    )
    observations: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(
        default_factory=dict,
        description="Weights, by role, with which tokens that the environment shows behind the "
        "prompt are trained by cross-entropy beside the rest, such as {tool: 0.05}. A token that "
        "the policy wrote has 1. The environment tools shows the role `tool`.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options that the environment itself reads. Its docstring lists them, e.g. "
        "that of pa_npu.environments.tools.",
    )

    @property
    def has_gateway(self) -> bool:
        """Returns whether sessions are worked at by programs, through the run's gateway."""
        return self.name in ("agents", "verifiers")

    @property
    def has_sessions(self) -> bool:
        """Returns whether samples are made of sessions, whose environment may give rewards."""
        return self.has_gateway or self.name in ("remote", "tool_class")


Outcome = Literal["done", "turns", "tokens", "time", "output", "failed"]
SampledField = Literal[
    "tool_choice",
    "response_format",
    "temperature",
    "seed",
    "top_p",
    "top_k",
    "reasoning_effort",
]


class AgentConfig(Section):
    command: str | None = Field(
        None,
        min_length=1,
        description="Command line of the agent, run without a shell, once per session. Its "
        "environment has OPENAI_BASE_URL, OPENAI_API_KEY and TASK (JSON), and it ends "
        "by itself. null: agents connect by themselves and take tasks.",
    )
    programs: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Number of agent.command's processes that stay and take one task after "
        "another, or several at once, from the gateway (GET /tasks). null starts a "
        "process for every session.",
    )
    container: str | None = Field(
        None,
        pattern=r"^(--?[^\s]+\s+)*\w[\w.:/@-]*$",
        description="Container image in which agent.command runs, by docker or podman. Options of "
        "`docker run` may stand before it, such as --memory=8g; without them a "
        "container has 4g, 2 CPUs and 512 processes. null runs the command as a "
        "process of this machine.",
    )
    concurrent: int = Field(
        64,
        ge=1,
        le=4096,
        description="Maximum number of sessions at once, open or offered to agents.",
    )
    output_kib: int = Field(
        1024,
        ge=1,
        description="Maximum size of a program's standard output and error in KiB. A session that "
        "exceeds it ends with the outcome output.",
    )
    discards: Several[Outcome] = Field(
        ("time", "output", "failed"),
        description="Outcomes whose sessions are not trained: time and output (limits above), "
        "failed (the program ended with an error), turns (environment.max_turns), "
        "tokens (rollout.max_response_tokens, data.max_prompt_tokens), done.",
    )
    serve_as_sampled: Several[SampledField] = Field(
        (),
        description="Fields of agents' requests that are accepted with any value and have no "
        "effect: the run samples as it samples. Their sessions are counted in metrics.jsonl. "
        "A field that is not named is refused where it would change what is sampled.",
    )
    tool_parser: str = Field(
        "auto",
        min_length=1,
        description="What finds tool calls in the policy's text: hermes; template (transformers' "
        "parse_response); or the name of one of vLLM's parsers. auto takes template if "
        "the tokenizer has one, otherwise hermes.",
    )
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of the gateway at placement.host, also for other programs with the run's "
        "key (docs/agents.md). 0 takes a free port, which RUN/gateway.json names. "
        "null: with environment.name=agents the gateway listens on loopback, otherwise "
        "there is no gateway.",
    )
