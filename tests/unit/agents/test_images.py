"""Images in agents' messages, of the user and of tools, at any turn, in three APIs: what the policy is shown is what is trained."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import pytest
import torch

from pa_npu.agents.environment import AgentEnvironment
from pa_npu.agents.openai_format import AgentRequest, AgentRequestRefused
from pa_npu.agents.tool_class import with_images
from pa_npu.backends.fsdp.model import ScoredModel, load_model
from pa_npu.backends.fsdp.vision import pack_images
from pa_npu.coordinator.episode import run_episode
from pa_npu.data.prompts import Prompt
from pa_npu.engines.client import EngineClient
from pa_npu.engines.protocol import Generation, Sampling
from pa_npu.engines.transformers.server import load_server, serving
from pa_npu.environments.protocol import Generate
from pa_npu.environments.registry import make_environment, opened
from pa_npu.families.model_directory import load_tokenizer
from pa_npu.samples.microbatch import pack
from pa_npu.samples.types import Sample
from pa_npu.vision.images import ShownImage, to_png
from tests.helpers.agents import Client, client_of, program, user
from tests.helpers.vision import (
    IMAGE_TOKEN,
    group_of,
    images_of,
    make_vision,
    picture,
    prompt_of,
    reader_of,
    transformers_logprobs,
    vision_config,
)

TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
# The tiny model's template for agents: parts of every role, and calls.
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + ('user' if message['role'] == 'tool' else "
    "message['role']) + '|>' }}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' + "
    "{'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson + "
    "'</tool_call>' }}{% endfor %}{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{{ '' if tools is "
    "none else '' }}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_vision(tmp_path_factory.mktemp("vision"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def config_of(model: Path, **sections: Any) -> Any:
    chosen = {
        "environment": {"name": "agents", "max_turns": 6},
        "data": {"max_prompt_tokens": 128},
        "rollout": {"max_response_tokens": 200},
    }
    return vision_config(model, **{**chosen, **sections})


@pytest.fixture
async def agents(model: Path) -> AsyncIterator[AgentEnvironment]:
    environment = make_environment(config_of(model), load_tokenizer(str(model)))
    async with opened(environment, 30.0) as opened_environment:
        assert isinstance(opened_environment, AgentEnvironment)
        yield opened_environment


class Policy(Generate):
    """Writes scripted texts, and notes what it was shown."""

    def __init__(self, model: Path, *texts: str) -> None:
        self.tokenizer = load_tokenizer(str(model))
        self.texts = list(texts)
        self.asked: list[tuple[np.ndarray, tuple[ShownImage, ...], int]] = []

    def idle_s(self) -> float:
        return 0.0

    async def __call__(
        self, tokens: np.ndarray, *, turn: int = 0, images: Any = None, **_: Any
    ) -> list[Generation]:
        self.asked.append((tokens, tuple(images), turn))
        text = self.texts[min(len(self.asked), len(self.texts)) - 1]
        written = np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        return [Generation(written, np.full(len(written), -0.5, np.float32), "", "stop", 3)]


def png(seed: int, width: int = 84, height: int = 56) -> bytes:
    return to_png(np.array(picture(seed, width, height)))


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data), "detail": "auto"}}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


FIRST, SECOND = png(1), png(2, 56, 112)
QUESTION = [text("what is "), part(FIRST), text("?")]


async def by_chat(client: Client) -> None:
    asked = {"role": "user", "content": QUESTION}
    first = await client.chat([asked], tools=TOOLS)
    message = first.choices[0].message.model_dump(exclude_none=True)
    shown = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"]}
    shown["content"] = [text("see "), part(SECOND)]
    await client.chat([asked, message, shown], tools=TOOLS)


async def by_responses(client: Client) -> None:
    create = client.openai.responses.create
    content: Any = [
        {"type": "input_text", "text": "what is "},
        {"type": "input_image", "image_url": url(FIRST), "detail": "auto"},
        {"type": "input_text", "text": "?"},
    ]
    tools: Any = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
    asked: Any = [{"role": "user", "content": content}]
    first = await create(model="any", input=asked, tools=tools)
    (call,) = [item for item in first.output if item.type == "function_call"]
    output: Any = [
        {"type": "input_text", "text": "see "},
        {"type": "input_image", "image_url": url(SECOND)},
    ]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": output}
    await create(model="any", input=[result], previous_response_id=first.id, tools=tools)


async def by_messages(client: Client) -> None:
    claude = anthropic.AsyncAnthropic(base_url=client.root, api_key=client.key, max_retries=0)

    def block(data: bytes) -> dict[str, Any]:
        encoded = base64.b64encode(data).decode()
        source = {"type": "base64", "media_type": "image/png", "data": encoded}
        return {"type": "image", "source": source}

    tools: Any = [{"name": "look", "input_schema": {"type": "object"}}]
    asked: Any = {"role": "user", "content": [text("what is "), block(FIRST), text("?")]}
    create = claude.messages.create
    first = await create(model="any", max_tokens=50, messages=[asked], tools=tools)
    (call,) = [item for item in first.content if item.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id}
    result["content"] = [text("see "), block(SECOND)]
    written: Any = {"role": "assistant", "content": first.model_dump()["content"]}
    await create(
        model="any",
        max_tokens=50,
        messages=[asked, written, {"role": "user", "content": [result]}],
        tools=tools,
    )


@pytest.mark.parametrize("ask", [by_chat, by_responses, by_messages])
async def test_two_turns_with_images_are_one_branch_that_shows_both(
    ask: Any, agents: AgentEnvironment, model: Path
) -> None:
    policy = Policy(model, f"so {CALL}<|end|>", "#### 4<|end|>")
    client = await client_of(agents, policy)
    await ask(client)
    processor = reader_of(model).processor
    places = []
    for data, size in ((FIRST, (56, 84)), (SECOND, (112, 56))):
        places.append((data, processor.num_tokens(processor.grid_of(*size))))
    (tokens, images, _), (later_tokens, later_images, _) = policy.asked
    assert [image.length for image in later_images] == [length for _, length in places]
    assert len(images) == 1 and images[0].start == later_images[0].start
    for image in later_images:
        assert (later_tokens[image.start : image.end] == IMAGE_TOKEN).all()
    assert np.count_nonzero(later_tokens == IMAGE_TOKEN) == sum(length for _, length in places)
    # token truth: the second request begins with what was shown and written, to the token
    before = np.concatenate([tokens, policy.tokenizer(policy.texts[0])["input_ids"]])
    assert np.array_equal(later_tokens[: len(before)], before)

    (sample,) = client.samples()
    assert sample.num_trained == sum(len(policy.tokenizer(t)["input_ids"]) for t in policy.texts)
    for run, image, seed in zip(sample.placeholders, later_images, (1, 2), strict=True):
        assert (run.start, run.length) == (image.start, image.length)
        size = (84, 56) if seed == 1 else (56, 112)
        expected = processor.resized(picture(seed, *size))
        assert np.array_equal(run.attachments[0].array, expected)


async def test_equal_texts_with_another_image_are_another_branch(
    agents: AgentEnvironment, model: Path
) -> None:
    client = await client_of(agents, Policy(model, "#### 4<|end|>"))
    for data in (png(1), png(3), png(1)):
        await client.chat([{"role": "user", "content": [part(data)]}])
    one, other = [node.images[0] for node in client.session.tree.nodes[1:3]]
    assert one.length == other.length and one.file.digest != other.file.digest
    goes_on = [
        {"role": "user", "content": [part(png(3))]},
        {"role": "assistant", "content": "#### 4"},
        user("sure?"),
    ]
    await client.chat(goes_on)
    assert client.session.tree.nodes[-1].parent is client.session.tree.nodes[2]
    asked = client.session.generate.asked  # type: ignore[attr-defined]
    turns = [turn for *_, turn in asked]
    assert len(set(turns)) == 4, "seeds of equal tokens differ by what they show"
    assert np.array_equal(asked[0][0], asked[1][0])
    digests = [[run.attachments[0].digest for run in s.placeholders] for s in client.samples()]
    assert len(digests) == 3 and len({tuple(digest) for digest in digests}) == 2


async def test_what_cannot_be_shown_is_one_clear_error_in_the_form_of_the_api(
    agents: AgentEnvironment, model: Path
) -> None:
    client = await client_of(agents, Policy(model, "#### 4<|end|>"))
    large = png(1, 28 * 20, 28 * 20)

    def image(value: Any) -> list[Any]:
        return [{"type": "image_url", "image_url": {"url": value}}]

    cases = [
        (image("http://x/a.png"), 'image 1: "http://x/a.png" is no data URL'),
        (image("/etc/passwd"), "is no data URL, and nothing is fetched here"),
        (image("file:///etc/passwd"), "is no data URL"),
        ([{"type": "image"}], "null is no data URL"),
        (image("data:image/png;base64,%%%"), "is no data URL of base64"),
        (image(url(b"no image")), "8 bytes are no image in one of the formats PNG"),
        ([part(FIRST), part(FIRST[: len(FIRST) // 2])], "image 2: "),
        ([part(large)] * 3, "tokens do not fit: a branch may begin with 128"),
        ("an <|image_pad|>", "a text has <|image_pad|>, which stands for an image"),
        ([{"type": "video_url", "video_url": {"url": "x"}}], "only parts of type text can be read"),
    ]
    for content, reason in cases:
        body = {"messages": [{"role": "user", "content": content}]}
        status, answer = await client.send("/v1/chat/completions", body)
        assert status == 400 and answer["error"]["type"] == "invalid_request_error", answer
        message = answer["error"]["message"]
        assert reason in message and "\n" not in message, message
    source = {"type": "file", "file_id": "f"}
    asked = {"role": "user", "content": [{"type": "image", "source": source}]}
    status, answer = await client.send("/v1/messages", {"messages": [asked], "max_tokens": 5})
    assert status == 400 and answer["type"] == "error"
    assert "an image of source 'file' is not served" in answer["error"]["message"]
    item = {"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}
    status, answer = await client.send("/v1/responses", {"input": [item]})
    assert status == 400 and "by its file_id is not served" in answer["error"]["message"]
    status, answer = await client.send("/v1/completions", {"prompt": "a <|image_pad|>"})
    assert status == 400 and "the placeholder of an image" in answer["error"]["message"]
    assert len(client.session.tree.nodes) == 1 and client.session.failure is None
    await client.chat([{"role": "user", "content": QUESTION}])


async def test_a_model_of_text_says_so(tmp_path: Path) -> None:
    from tests.helpers.models import make_model

    path = make_model(tmp_path / "text", "qwen2")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    environment = make_environment(config_of(path), load_tokenizer(str(path)))
    async with opened(environment, 30.0) as agents:
        assert isinstance(agents, AgentEnvironment)
        with pytest.raises(AgentRequestRefused) as refused:
            agents._chat.render([{"role": "user", "content": QUESTION}], ())
    assert "an image, but a model of qwen2 reads text alone; send text alone" in str(refused.value)


async def test_a_placeholder_that_the_policy_wrote_stays_a_token(
    agents: AgentEnvironment, model: Path
) -> None:
    policy = Policy(model, "a<|image_pad|>b<|end|>", "#### 4<|end|>")
    client = await client_of(agents, policy)
    asked = {"role": "user", "content": QUESTION}
    await client.chat([asked])
    written = {"role": "assistant", "content": "a<|image_pad|>b"}
    more = {"role": "user", "content": [text("and "), part(SECOND)]}
    await client.chat([asked, written, more])
    tokens, images, _ = policy.asked[1]
    shown = sum(image.length for image in images)
    assert len(images) == 2 and np.count_nonzero(tokens == IMAGE_TOKEN) == shown + 1
    (sample,) = client.samples()
    (place,) = np.flatnonzero((sample.tokens == IMAGE_TOKEN) & sample.trained)
    assert not any(run.start <= place < run.end for run in sample.placeholders)


async def test_two_turns_with_images_are_trained_exactly(
    agents: AgentEnvironment, model: Path
) -> None:
    """What an engine sampled, what trainers compute of the packed group, and what transformers' own
    forward computes of each sequence are one.
    """
    server = load_server(str(model), "fp32", torch.device("cpu"), "key", 512, 8)

    class Engine(Generate):
        async def __call__(
            self, tokens: Any, *, sample: int = 0, turn: int = 0, images: Any = None, **_: Any
        ) -> list[Generation]:
            sampling = Sampling(max_tokens=6, temperature=1.0, ignore_eos=True)
            seed = (turn + sample) % 2**31
            written = await client.generate(
                tokens, 1, seed, sampling, deadline_s=60, images=images or ()
            )
            return [replace(generation, version=0) for generation in written]

    samples: list[Sample] = []
    async with (
        serving(server, "127.0.0.1", 0) as address,
        EngineClient(address, 384, "key", "transformers") as client,
    ):
        for number in range(2):
            session = await client_of(agents, Engine(), number)
            asked: Any = {"role": "user", "content": QUESTION}
            first = await session.session.chat_turn(AgentRequest({"messages": [asked]}))
            written = {"role": "assistant", "content": first.answer.shown[0]}
            shown = {"role": "tool", "content": [text("see "), part(SECOND)]}
            await session.session.chat_turn(AgentRequest({"messages": [asked, written, shown]}))
            samples += session.samples()
    assert [len(sample.placeholders) for sample in samples] == [2, 2]
    theirs = load_model(str(model), torch.float32).eval()
    scored = ScoredModel(load_model(str(model), torch.float32), "auto").eval()
    processor = reader_of(model).processor
    microbatch = pack([group_of(samples)], True, 2)
    assert len(microbatch.attachments) < 4, "images of several samples are there once"
    with torch.no_grad():
        packed = scored(
            microbatch.tokens, microbatch.layout, microbatch.rows, microbatch.targets, 1.0, 512,
            images=pack_images(microbatch, processor),
        ).logprobs  # fmt: skip
        expected = []
        for sample in samples:
            images = images_of(sample, processor)
            logprobs = transformers_logprobs(theirs, processor, sample.tokens, images)
            expected.append(logprobs[torch.from_numpy(sample.trained[1:])])
    sampled = np.concatenate([sample.logprobs[sample.trained] for sample in samples])
    assert (packed - torch.cat(expected)).abs().max() < 5e-6
    assert np.abs(packed.numpy() - sampled).max() < 5e-6


async def test_a_task_has_the_prompts_images_and_its_samples_show_what_was_sent(
    model: Path, tmp_path: Path
) -> None:
    """A program gets the images of its row, and sends them in its second request."""
    lines = (
        "content = [{'type': 'image_url', 'image_url': {'url': u}} for u in task['images']]",
        "ask(os.environ['OPENAI_BASE_URL'] + '/chat/completions',"
        " {'messages': [{'role': 'user', 'content': content}]})",
        "ask(os.environ['SESSION_URL'] + '/reward', {'reward': 1.0})",
    )
    config = config_of(model, agent={"command": program(tmp_path, *lines)})
    tokens, images = prompt_of(model, [picture(1)])
    prompt = Prompt(0, tokens, "1", "text", {"question": "q"}, images=images)
    policy = Policy(model, "#### 4<|end|>")
    environment = make_environment(config, load_tokenizer(str(model)))
    async with opened(environment, 60.0) as agents:
        samples = await run_episode(config, agents, prompt, 2, policy, 200)  # type: ignore[arg-type]
    assert [sample.reward for sample in samples] == [1.0] * len(samples)
    with_image = [sample for sample in samples if sample.placeholders]
    assert len(with_image) == 2 and len(samples) == 4
    for sample in with_image:
        (run,) = sample.placeholders
        assert np.array_equal(run.attachments[0].array, images[0].pixels)
        assert (sample.tokens[run.start : run.end] == IMAGE_TOKEN).all()


def test_a_prompts_marks_become_its_images(model: Path) -> None:
    _, images = prompt_of(model, [picture(1), picture(2)])
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "<image>a<image>"},
    ]
    system, asked = with_images(messages, images)
    assert system == messages[0]
    assert [p.get("image", p.get("text")) for p in asked["content"]] == [images[0], "a", images[1]]
    assert with_images(messages, ()) == messages
