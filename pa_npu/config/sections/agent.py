"""Keys of agents: programs of their own that call the run's gateway (environment.name=agents), and of the gateway itself."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pa_npu.config.sections.base import Section

Outcome = Literal["done", "turns", "tokens", "time", "output", "failed"]


class AgentConfig(Section):
    command: str | None = Field(
        None,
        min_length=1,
        description="Program of one session, as in a shell but without one: it has OPENAI_BASE_URL, OPENAI_API_KEY and TASK (JSON) "
        "in its environment and ends by itself; none leaves sessions to agents that come and take tasks.",
    )
    programs: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Programs that stay, and take one task after another from the gateway (GET /tasks), or several at once; none "
        " starts one for every session.",
    )
    container: str | None = Field(
        None,
        pattern=r"^(--?[^\s]+\s+)*\w[\w.:/@-]*$",
        description="Image in which agent.command runs, by docker or podman, behind options of `docker run` such as --memory=8g, "
        "which has 4g, 2 CPUs and 512 processes otherwise; none runs it as a process of this machine.",
    )
    concurrent: int = Field(64, ge=1, le=4096, description="Sessions at once, open or offered to be taken.")
    output_kib: int = Field(
        1024,
        ge=1,
        description="Most that a program may write to its standard output and error, in KiB; then outcome output.",
    )
    discards: tuple[Outcome, ...] = Field(
        ("time", "output", "failed"),
        description="Sessions with these outcomes are not trained: time and output (limits above), failed (the program ended with "
        "an error), turns (environment.max_turns), tokens (rollout.max_response_tokens, data.max_prompt_tokens), done.",
    )
    tool_parser: str = Field(
        "auto",
        min_length=1,
        description="What finds tool calls in the policy's text: hermes, template (transformers' parse_response), or a parser of "
        "vLLM by its name there; auto is template where the tokenizer has one, else hermes.",
    )
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of the gateway at placement.host, also for other programs with the run's key (docs/agents.md); 0 takes a "
        "free one, which RUN/gateway.json names; none is loopback for environment.name=agents, and no gateway otherwise.",
    )
