"""A judge's scores are rewards from 0 to 1; what it does not score is never a zero: the run ends, or the response is neutral."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pa_npu.config.schema import Config
from pa_npu.config.sections.reward import JudgeConfig, RewardConfig, RewardFunction
from pa_npu.errors import DataError, PaNpuError
from pa_npu.rewards import judge as judge_module
from pa_npu.rewards.check import check_reward_functions
from pa_npu.rewards.functions import RewardInput
from pa_npu.rewards.judge import JudgeReward
from pa_npu.rewards.pool import RewardPool, neutral
from tests.helpers.fake_judge import Answer, FakeJudge, fake_judge


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "_FIRST_PAUSE_S", 0.01)


def settings(judge: FakeJudge, **more: Any) -> JudgeConfig:
    return JudgeConfig(url=judge.url, model="grader", timeout_s=more.pop("timeout_s", 20.0), **more)


def group(*responses: str, **row: Any) -> RewardInput:
    return RewardInput("What is 2+2?", "4", list(responses), [3] * len(responses), row)


async def rewards(
    config: JudgeConfig, *groups: RewardInput, cache: Path | None = None
) -> list[list[float | None]]:
    reward = JudgeReward(config, cache)
    try:
        return await asyncio.gather(*map(reward, groups))
    finally:
        await reward.close()


def by_number(message: str, _: int) -> Answer:
    """The score is the last number of the response."""
    response = message.partition("Response:\n")[2].partition("\n")[0]
    return Answer(f"The scale says Score: 0 for nonsense.\n**Score:** {response.split()[-1]}")


async def test_scores_become_rewards_and_the_judge_reads_what_the_template_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "secret-key")
    with fake_judge(by_number) as judge, caplog.at_level(logging.DEBUG):
        config = settings(
            judge,
            template="{row.level}|{prompt}|{answer}|{unknown} {lowest} "
            "{highest}\nResponse:\n{response}\n",
            scores=(1, 5),
        )
        actual = await rewards(config, group("it is 1", "it is 4", "it is 5", level="easy"))
    assert actual == [[0.0, 0.75, 1.0]]
    # they are asked at once
    message, headers, body = next(asked for asked in judge.asked if "it is 1" in asked[0])
    assert message == "easy|What is 2+2?|4|{unknown} 1 5\nResponse:\nit is 1\n"
    assert (
        headers["Authorization"] == "Bearer secret-key" and body["path"] == "/v1/chat/completions"
    )
    assert [message["role"] for message in body["messages"]] == ["user"]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("grader", 0.0, 512)
    assert "secret-key" not in caplog.text


async def test_the_score_is_read_from_json_by_a_pattern_behind_the_thinking() -> None:
    texts = {
        "plain": '{"score": 3}',
        "fenced": 'Well:\n```json\n{"why": "x", "score": "4.5"}\n```\ndone',
        "within": 'I say {"score": 10} today',
        "thought": '<think>{"score": 1}?</think>{"score": 10}',
    }
    pattern = r'"score": *"?(\d+(?:\.\d+)?)'
    with fake_judge(lambda message, _: Answer(texts[message])) as judge:
        actual = await rewards(
            settings(judge, score_pattern=pattern, template="{response}"), group(*texts)
        )
    assert actual == [[0.3, 0.45, 1.0, 1.0]]


async def test_a_reward_models_number_is_the_score_also_beyond_the_scale() -> None:
    def answer(message: str, _: int) -> Answer:
        scores = {"good": [[0.1], [12.5]], "poor": [-2.5], "odd": "no number"}[message]
        return Answer(body=json.dumps({"data": [{"index": 0, "data": scores}]}).encode())

    with fake_judge(answer) as judge:
        config = settings(judge, api="pooling", scores=(-5, 5))
        solved = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "the reference"},
        ]
        actual = await rewards(
            config,
            group("good", "poor", "odd", question="2+2?"),
            group("good", messages=[{"role": "user"}]),
            group("poor", messages=solved),
        )
    assert actual == [[1.75, 0.25, None], [1.75], [0.25]]
    bodies = [body for _, _, body in judge.asked]
    assert all(body["path"] == "/pooling" and "temperature" not in body for body in bodies)
    talks = [body["messages"] for body in bodies]
    assert [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "good"}] in talks
    assert [{"role": "user"}, {"role": "assistant", "content": "good"}] in talks
    assert [solved[0], {"role": "assistant", "content": "poor"}] in talks, (
        "the reference is no turn of the conversation"
    )


async def test_what_fails_for_a_moment_is_asked_again_and_what_will_fail_again_is_not() -> None:
    def answer(message: str, before: int) -> Answer:
        first = {
            "busy": Answer(status=429, headers={"Retry-After": "0"}),
            "down": Answer(status=503),
            "garbled": Answer(body=b"<html>"),
            "vague": Answer("it is good"),
            "beyond": Answer("Score: 11"),
            "too long": Answer(status=400, body=b"maximum context length"),
        }[message]
        return first if before == 0 or message == "too long" else Answer("Score: 6")

    with fake_judge(answer) as judge:
        names = ("busy", "down", "garbled", "vague", "beyond", "too long")
        actual = await rewards(settings(judge, template="{response}"), group(*names))
    assert actual == [[0.6] * 5 + [None]]
    asked = [message for message, _, _ in judge.asked]
    assert [asked.count(name) for name in names] == [2, 2, 2, 2, 2, 1]


async def test_a_request_over_its_deadline_is_one_attempt_and_all_of_them_end_without_a_score() -> (
    None
):
    hold = threading.Event()
    with fake_judge(lambda *_: Answer(hold=hold)) as judge:
        reward = JudgeReward(settings(judge, timeout_s=0.2), None)
        actual = await reward(group("a"))
        await reward.close()
        hold.set()
    assert actual == [None] and len(judge.asked) == 4
    assert (
        reward.problem is not None
        and "no answer within reward.judge.timeout_s = 0.2 s" in reward.problem
    )


async def test_many_groups_are_judged_at_once_up_to_the_limit_and_equal_ones_are_asked_once() -> (
    None
):
    barrier = threading.Barrier(3)

    def answer(message: str, _: int) -> Answer:
        if "same" not in message:
            barrier.wait(20)  # passes only where three are asked at once
        return Answer("Score: 5")

    with fake_judge(answer) as judge:
        config = settings(judge, concurrency=3, template="{response}")
        actual = await rewards(config, *(group(f"{n}", f"{n}!", f"{n}?") for n in range(3)))
        assert actual == [[0.5] * 3] * 3 and judge.most_at_once == 3 and len(judge.asked) == 9
        assert await rewards(config, group("same", "same"), group("same")) == [[0.5, 0.5], [0.5]]
        assert len(judge.asked) == 10


async def test_a_retry_of_the_first_group_waits_for_no_later_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One request at a time; the first answer fails. trainer.wait_timeout_s follows from this
    (Deadlines.reward_limit_s).
    """
    monkeypatch.setattr(judge_module, "_FIRST_PAUSE_S", 0.0)
    with fake_judge(
        lambda message, before: Answer(status=500 if message == "0" and not before else 200)
    ) as judge:
        reward = JudgeReward(settings(judge, concurrency=1, template="{response}"), None)
        await asyncio.gather(*(reward(group(*responses)) for responses in ("0", "12", "34")))
        await reward.close()
    asked = [message for message, _, _ in judge.asked]
    assert asked[0] == "0" and asked.index("0", 1) <= 2, asked
    assert asked[asked.index("0", 1) + 1 :] == [
        n for n in "1234" if n not in asked[1 : asked.index("0", 1)]
    ], asked


async def test_scores_are_kept_on_disk_by_content_and_a_broken_file_costs_only_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "run" / "judge_scores.sqlite"
    with fake_judge(lambda *_: Answer("Score: 8")) as judge:
        config = settings(judge)
        assert await rewards(config, group("a", "b"), cache=cache) == [[0.8, 0.8]]
        assert (
            await rewards(config, group("b", "a"), cache=cache) == [[0.8, 0.8]]
            and len(judge.asked) == 2
        )
        another = config.model_copy(update={"model": "another"})
        assert await rewards(another, group("a"), cache=cache) == [[0.8]] and len(judge.asked) == 3
        cache.write_bytes(b"no database, but long enough to be looked at as one" * 40)
        assert await rewards(config, group("a"), cache=cache) == [[0.8]] and len(judge.asked) == 4
    assert "the judge is asked every time" in caplog.text


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_wrong_address_or_key_ends_the_run_at_once_and_the_key_is_in_no_message(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "secret-key")
    with fake_judge(lambda *_: Answer(status=status, body=b"no access for secret-key")) as judge:
        wanted = rf"reward\.judge\.url: .* status {status}.*JUDGE_API_KEY"
        with pytest.raises(DataError, match=wanted) as ended:
            await rewards(settings(judge), group("a"))
    assert len(judge.asked) == 1 and "secret-key" not in str(ended.value)


def functions(*names: str) -> tuple[RewardFunction, ...]:
    return tuple(RewardFunction(name=name) for name in names)


def half_broken(message: str, _: int) -> Answer:
    return (
        Answer(status=400)
        if "bad" in message
        else Answer("Score: 10" if "good" in message else "Score: 2")
    )


async def test_in_the_pool_a_response_without_a_score_is_neutral_and_counted(
    tmp_path: Path,
) -> None:
    with fake_judge(half_broken) as judge:
        config = RewardConfig(
            functions=functions("judge", "math"),
            judge=settings(judge, on_failure="neutral", template="{response}"),
        )
        async with RewardPool(config, tmp_path) as pool:
            result, none, fine = await asyncio.gather(
                pool.score(group("good #### 4", "poor #### 5", "bad #### 4")),
                pool.score(group("bad", "bad too")),
                pool.score(group("good", "poor")),
            )
    np.testing.assert_allclose(result.functions["judge"], [1.0, 0.2, 0.6])
    np.testing.assert_allclose(result.total, [2.0, 0.2, 1.6], rtol=1e-6)
    assert (
        result.no_verdict == {"judge": 1} and "no verdict on 1 of 3 responses" in result.errors[0]
    )
    assert none.functions["judge"].tolist() == [0.5, 0.5] and none.no_verdict == {"judge": 2}
    assert fine.correct.tolist() == [True, False] and fine.errors == () and fine.no_verdict == {}
    assert (tmp_path / "judge_scores.sqlite").is_file()
    assert neutral([None, 1.0, 0.0]) == [0.5, 1.0, 0.0]


async def test_by_default_a_response_without_a_score_ends_the_run_and_says_why() -> None:
    with fake_judge(half_broken) as judge:
        config = RewardConfig(
            functions=functions("judge"), judge=settings(judge, template="{response}")
        )
        async with RewardPool(config) as pool:
            assert (await pool.score(group("good"))).total.tolist() == [1.0]
            with pytest.raises(
                PaNpuError,
                match=r"reward\.judge: no verdict on 1 of 2 .*status 400.*on_failure=neutral",
            ):
                await pool.score(group("good", "bad"))


async def test_a_judge_that_fails_for_most_groups_ends_also_a_run_that_takes_it_as_neutral() -> (
    None
):
    with fake_judge(half_broken) as judge:
        config = RewardConfig(
            functions=functions("judge"),
            judge=settings(judge, on_failure="neutral", template="{response}"),
        )
        async with RewardPool(config) as pool:
            with pytest.raises(DataError, match=r"judge failed for 8 of the last 8 groups"):
                for _ in range(8):
                    await pool.score(group("bad"))


def full(judge: dict[str, Any], *names: str) -> Config:
    tree = {"model": {"path": "m"}, "data": {"train": "d"}}
    return Config.model_validate(
        {**tree, "reward": {"functions": [{"name": name} for name in names], "judge": judge}}
    )


GOOD = {"url": "http://127.0.0.1:9/v1", "model": "m"}


@pytest.mark.parametrize(
    ("judge", "names", "message"),
    [
        ({}, ["judge"], "reward.judge.url: the function judge needs"),
        ({"url": "http://x/v1"}, ["judge"], "reward.judge.model: "),
        ({**GOOD, "url": "http://me:secret@x/v1"}, ["judge"], "more than the address of a server"),
        ({**GOOD, "url": "ftp://x"}, ["judge"], "is no URL of a server"),
        ({**GOOD, "template": "grade it"}, ["judge"], "reward.judge.template: has no {response}"),
        ({**GOOD, "scores": [5, 5]}, ["judge"], "reward.judge.scores: 5 is not below"),
        ({**GOOD, "score_pattern": "("}, ["judge"], "is not a regular expression"),
        ({**GOOD, "score_pattern": "(a)(b)"}, ["judge"], "has 2 groups; put one"),
        (
            {**GOOD, "api": "pooling", "score_pattern": "(a)"},
            ["judge"],
            "reward.judge.score_pattern: is not read with",
        ),
        (GOOD, ["math"], "reward.judge: would be read by nothing"),
        (GOOD, ["judge", "judge"], "judge is listed twice"),
    ],
)
def test_a_judge_that_cannot_work_is_one_line(
    judge: dict[str, Any], names: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        full(judge, *names)


def test_the_check_before_a_run_asks_the_judge_once_per_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample = group("#### 4", "I do not know.", "#### 4")
    with fake_judge(lambda *_: Answer("Score: 3")) as judge:
        check_reward_functions(full({"url": judge.url, "model": "m"}, "judge", "math"), sample)
        assert len(judge.asked) == 2
        check_reward_functions(
            full({"url": judge.url, "model": "m"}, "judge"), sample, ask_judge=False
        )
        assert len(judge.asked) == 2
    with (
        fake_judge(lambda *_: Answer("no number")) as judge,
        pytest.raises(
            DataError,
            match=r"reward\.judge\.url: http://127.*no score \(reward\.judge\.score_pattern",
        ),
    ):
        check_reward_functions(full({"url": judge.url, "model": "m"}, "judge"), sample)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("secret\n", "begins or ends with a space or a line end"),
        (" secret", "begins or ends with a space"),
        ("sec\r\nret", "holds a line end or another character"),
        ("secr\u00e9t", "no header of a request can hold"),
    ],
)
def test_a_key_that_no_request_can_hold_is_named_before_the_judge_is_asked_and_not_shown(
    key: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", key)
    with fake_judge(by_number) as judge:
        reward = {
            "functions": [{"name": "judge"}],
            "judge": settings(judge).model_dump(mode="json"),
        }
        config = Config.model_validate(
            {"model": {"path": "m"}, "data": {"train": "d"}, "reward": reward}
        )
        with pytest.raises(
            DataError, match=f"JUDGE_API_KEY: the environment variable .*{reason}"
        ) as refused:
            check_reward_functions(config, group("it is 5"))
        assert (
            not judge.asked and "\n" not in str(refused.value) and "sec" not in str(refused.value)
        )


def test_a_judge_that_fails_the_check_leaves_no_run_directory_behind(tmp_path: Path) -> None:
    with fake_judge(lambda *_: Answer("nonsense")) as judge:
        reward = {
            "functions": [{"name": "judge"}],
            "judge": settings(judge).model_dump(mode="json"),
        }
        run = {"dir": str(tmp_path / "runs" / "mine")}
        config = Config.model_validate(
            {"model": {"path": "m"}, "data": {"train": "d"}, "reward": reward, "run": run}
        )
        with pytest.raises(DataError, match=r"reward\.judge\.url"):
            check_reward_functions(config, group("it is 5"))
        assert judge.asked and list(tmp_path.iterdir()) == []
