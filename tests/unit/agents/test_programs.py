"""Programs that are agents get their tasks and no secrets, and begin again with the same seeds when killed."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pa_npu.agents import programs
from pa_npu.agents.environment import evaluated
from pa_npu.environments.protocol import EnvironmentFailed
from pa_npu.environments.registry import make_environment, opened
from pa_npu.errors import ConfigError
from tests.helpers.agents import (
    PROGRAM,
    PROMPT,
    TOKENIZER,
    Policy,
    asks_then_answers,
    config,
    program,
    rollout,
)
from tools import tiny_edits
from tools.make_tiny_model import END_OF_TURN


async def test_a_program_gets_a_task_of_any_length_and_asks_the_gateway_past_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.delenv("NO_PROXY", raising=False)
    file = tmp_path / "agent.py"
    lines = PROGRAM.replace(
        'json.loads(os.environ["TASK"])', 'json.load(open(os.environ["TASK_FILE"]))'
    )
    lines += """
same = json.loads(os.environ["TASK"]) == task if "TASK" in os.environ else None
kept = "example.org" in os.environ["no_proxy"]
ask(os.environ["SESSION_URL"] + "/reward", {"reward": len(task["row"]["text"]) + 0.5 * (same is True) + 0.25 * kept})
"""
    file.write_text(lines)
    chosen = config(command=shlex.join([sys.executable, str(file)]))
    for length, reward in ((180_000, 180_000.25), (10, 10.75)):
        prompt = replace(PROMPT, row={**PROMPT.row, "text": "é" * length})
        async with opened(make_environment(chosen, TOKENIZER), 30.0) as environment:
            samples = await environment.rollout(prompt, 1, Policy(lambda shown: f"w{END_OF_TURN}"))
        assert [sample.reward for sample in samples] == [reward]


async def test_programs_inherit_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = (
        "HF_TOKEN",
        "WANDB_API_KEY",
        "VLLM_API_KEY",
        "PA_NPU_STORE",
        "JUDGE_API_KEY",
        "MY_PASSWORD",
    )
    for name in (*hidden, "PLAIN"):
        monkeypatch.setenv(name, "x")
    lines = f"found = [n for n in {(*hidden, 'PLAIN')} if n in os.environ]"
    lines += (
        '; ask(os.environ["SESSION_URL"] + "/reward", {"reward": len(found) + 10 * ("PLAIN" '
        "in found)})"
    )
    chosen = config(command=program(tmp_path, lines))
    samples, _ = await rollout(chosen, 1, lambda shown: f"w{END_OF_TURN}")
    assert [sample.reward for sample in samples] == [11.0]


async def test_programs_are_started_with_a_task_and_their_reward_is_the_sessions(
    tmp_path: Path,
) -> None:
    command = program(
        tmp_path,
        'ask(os.environ["SESSION_URL"] + "/reward", {"reward": len(task["answer"]) + 0.5})',
    )
    samples, _ = await rollout(
        config(command=command, concurrent=2), 3, lambda shown: f"w{END_OF_TURN}"
    )
    assert [sample.reward for sample in samples] == [2.5] * 3 and all(
        sample.finished for sample in samples
    )
    assert [sample.text for sample in samples] == ["w"] * 3


async def test_a_killed_program_begins_again_with_the_same_seeds(tmp_path: Path) -> None:
    flag = tmp_path / "was here"
    lines = (
        f"if not os.path.exists({str(flag)!r}): open({str(flag)!r}, 'w'); os.kill(os.getpid(), 9)"
    )
    samples, policy = await rollout(
        config(command=program(tmp_path, lines)), 1, lambda shown: f"w{END_OF_TURN}"
    )
    assert len(samples) == 1 and samples[0].finished and flag.exists()
    first, again = policy.turns
    assert (first.turn, first.sample, first.tokens.tolist()) == (
        again.turn,
        again.sample,
        again.tokens.tolist(),
    )


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("sys.exit('broken on purpose')", "failed"),
        ("import time; time.sleep(90)", "time"),
        ("print('x' * 10**6); import time; time.sleep(90)", "output"),
    ],
)
async def test_outcomes_decide_what_is_trained(
    tmp_path: Path, line: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One session of a group ends so, the other is done."""
    monkeypatch.setattr(programs, "_GRACE_S", 2.0)
    number = tmp_path / "number"
    lines = f"if not os.path.exists({str(number)!r}):\n    open({str(number)!r}, 'w')\n    {line}"
    keys = {
        "command": program(tmp_path, lines),
        "concurrent": 1,
        "timeout_s": 8 if outcome == "time" else 60,
        "output_kib": 8,
    }
    samples, policy = await rollout(config(**keys), 2, lambda shown: f"w{END_OF_TURN}")
    assert len(samples) == 1 and samples[0].finished
    length = len(samples[0].tokens)
    assert policy.counted == {
        "sessions_done": 1,
        f"sessions_{outcome}": 1,
        "tokens": length,
        "tokens_unique": length,
    }
    if outcome != "time":  # which is long
        number.unlink()
        samples, _ = await rollout(config(**keys, discards=[]), 2, lambda shown: f"w{END_OF_TURN}")
        assert sorted(sample.finished for sample in samples) == [False, True]
    if outcome == "failed":
        number.unlink()
        samples, _ = await rollout(config(**keys), 1, lambda shown: f"w{END_OF_TURN}")
        assert [sample.reward for sample in samples] == [0.0], (
            "a group of which nothing may be trained has no advantages"
        )


async def test_an_agent_that_asks_for_nothing_ends_the_run_in_one_line_with_its_last_words() -> (
    None
):
    command = shlex.join([sys.executable, "-c", "raise SystemExit('no module named nonsense')"])
    with pytest.raises(
        EnvironmentFailed, match=r"prompt 4 asked the policy for anything.*no module named nonsense"
    ) as error:
        await rollout(config(command=command), 2, asks_then_answers)
    assert "\n" not in str(error.value)


STAYING = """
import json, os, urllib.request
def ask(url, key, body=None):
    headers = {"Authorization": "Bearer " + key, "x-program": os.environ["PROGRAM"]}
    data = None if body is None else json.dumps(body).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(url, data, headers)))
while True:
    taken = ask(os.environ["GATEWAY_URL"] + "/tasks?wait_s=5", os.environ["OPENAI_API_KEY"])
    if taken["task"] is None: continue
    if os.path.exists("FLAG"): os.unlink("FLAG"); os.kill(os.getpid(), 9)
    url, key = taken["base_url"], taken["api_key"]
    ask(url + "/chat/completions", key, {"messages": [{"role": "user", "content": "q"}]})
    ask(url.removesuffix("/v1") + "/reward", key, {"reward": 1})
    ask(url.removesuffix("/v1") + "/end", key, {})
"""


async def test_programs_that_stay_take_one_task_after_another_and_what_a_killed_one_had_begins_again(
    tmp_path: Path,
) -> None:
    flag, file = tmp_path / "flag", tmp_path / "agent.py"
    flag.touch()
    file.write_text(STAYING.replace("FLAG", str(flag)))
    command = shlex.join([sys.executable, str(file)])
    samples, _ = await rollout(
        config(command=command, programs=1), 4, lambda shown: f"w{END_OF_TURN}"
    )
    assert (
        len(samples) == 4 and not flag.exists() and {sample.reward for sample in samples} == {1.0}
    )


async def test_a_program_may_end_after_every_task_and_is_started_again(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(STAYING.replace("FLAG", str(tmp_path / "never")) + "    break\n")
    command = shlex.join([sys.executable, str(file)])
    samples, _ = await rollout(
        config(command=command, programs=1), 5, lambda shown: f"w{END_OF_TURN}"
    )
    assert len(samples) == 5, "more tasks than a program that ends without one may be started"


async def test_a_program_that_ends_without_a_task_done_ends_the_run_in_one_line() -> None:
    command = shlex.join([sys.executable, "-c", "raise SystemExit('no module named nonsense')"])
    with pytest.raises(
        ConfigError, match=r"ended 3 times without a session done.*no module named nonsense"
    ):
        await rollout(config(command=command, programs=1), 1, asks_then_answers)


async def test_an_evaluation_has_one_sample_of_every_session_whatever_its_outcome(
    tmp_path: Path,
) -> None:
    """Two branches in each session; the program is named by a path relative to the working
    directory.
    """
    lines = (
        'ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": messages + '
        'messages}); sys.exit("no good end")'
    )
    command = program(tmp_path, lines).replace(sys.executable, "python")
    command = command.replace(str(tmp_path), os.path.relpath(tmp_path))
    environment = make_environment(config(command=command), TOKENIZER)
    async with opened(environment, 30.0):
        samples = await evaluated(environment).rollout(
            PROMPT, 2, Policy(lambda shown: f"w{END_OF_TURN}")
        )
    assert len(samples) == 2
    assert all(
        str(TOKENIZER.decode(sample.tokens.tolist())).count("6*7") == 2 for sample in samples
    ), "the last branch"


@pytest.mark.parametrize("text", ["right", "wrong", "leaves"])
async def test_the_example_that_edits_files_is_rewarded_by_its_tests(text: str) -> None:
    """The reward follows from what the policy wrote into the file, run in a sandbox; whoever ends
    the program passes nothing.
    """
    example = str(Path(__file__).parents[3] / "examples" / "edit_files_agent.py")
    row = tiny_edits.tasks(tiny_edits.NAMES)[0]
    (name,) = row["files"]
    written = {
        "right": row["answer"],
        "wrong": row["files"][name] + "# tried\n",
        "leaves": "raise SystemExit(0)",
    }[text]
    edit = {"name": "write_file", "arguments": {"name": name, "text": written}}
    calls = [edit, {"name": "run_tests", "arguments": {}}]

    def script(shown: str) -> str:
        turn = shown.count("<|assistant|>") - 1
        return (
            f"<tool_call>{json.dumps(calls[turn])}</tool_call>{END_OF_TURN}"
            if turn < 2
            else f"done{END_OF_TURN}"
        )

    chosen = config(command=shlex.join(["python", example]))
    chosen = chosen.model_copy(
        update={
            "data": chosen.data.model_copy(update={"max_prompt_tokens": 600}),
            "rollout": chosen.rollout.model_copy(update={"max_response_tokens": 900}),
        }
    )
    policy = Policy(script)
    async with opened(make_environment(chosen, TOKENIZER), 30.0) as environment:
        (sample,) = await environment.rollout(replace(PROMPT, row=row), 1, policy)
    assert sample.reward == (1.0 if text == "right" else 0.0)
    last = str(TOKENIZER.decode(policy.turns[-1].tokens.tolist()))
    assert last.count("passes: ") == (3 if text == "right" else 0) and "written" in last
