"""A run rewarded by a judge behind a URL and by a function of this file; the judge here is a stand-in, yours is any server.

bash launch/install_cpu.sh && source .venv/bin/activate
python tools/make_tiny_model.py --out .cache/tiny
python examples/judged_rewards.py [--iterations 5] [--judge http://HOST:PORT/v1 --judge-model NAME] [--run-dir runs/judged]
"""

from __future__ import annotations

import argparse
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TEMPLATE = (
    "Is the sum right?\nQuestion: {prompt}\nReference: {answer}\nResponse: {response}\nEnd "
    "with 'Score: N', 0 to 10."
)


def brevity(group: Any) -> list[float]:
    """The run's reward worker imports this file and calls it: group.prompt, answer, responses,
    response_tokens, row.
    """
    return [-0.01 * tokens for tokens in group.response_tokens]


@contextmanager
def stand_in_judge() -> Iterator[str]:
    """An OpenAI-compatible server that scores sums: 10 for the right one, 4 for some number, 0 for
    none. Gives its URL.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            question = body["messages"][-1]["content"]
            response = question.partition("Response: ")[2].partition("End with")[0]
            reference = re.findall(r"Reference: (\d+)", question)[-1:]
            number = re.findall(r"\d+", response)[-1:]
            score = 4 if number else 0
            if number and number == reference:
                score = 10
            answer = json.dumps(
                {"choices": [{"message": {"role": "assistant", "content": f"Score: {score}"}}]}
            ).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Nothing: the run's lines are what is watched."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, name="judge", daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


def train(options: argparse.Namespace, url: str) -> None:
    from pa_npu import Run

    keys = {
        "model.path": options.model,
        "run.dir": options.run_dir,
        "rollout.backend": options.backend,
        "schedule.iterations": options.iterations,
        "schedule.prompts_per_iteration": 8,
        "schedule.compare_iterations": 0,
        "data.test": None,
        "reward.functions": [
            {"name": "judge"},
            {"name": "examples.judged_rewards:brevity", "weight": 0.5},
        ],
        "reward.judge.url": url,
        "reward.judge.model": options.judge_model,
        "reward.judge.template": TEMPLATE,
        "reward.judge.on_failure": "neutral",
        "checkpoint.export_hf": False,
    }
    rows = [
        {"question": f"What is {x}+{y}?", "answer": str(x + y)}
        for x in range(10, 100)
        for y in range(10, 100, 7)
    ]
    with Run("configs/grpo_tiny.yaml", keys, train=rows, on_line=None) as run:
        for record in run:
            parts = ", ".join(f"{name} {value:.3f}" for name, value in record["rewards"].items())
            missing = record["reward_no_verdict"].get("judge", 0)
            print(
                f"iteration {record['iteration']}: {parts}; {missing} responses without a verdict",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=".cache/tiny/model")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--backend", default="vllm")
    parser.add_argument("--run-dir", default="runs/judged")
    parser.add_argument(
        "--judge", help="base URL of an OpenAI-compatible server; a stand-in where it is left out"
    )
    parser.add_argument("--judge-model", default="judge")
    options = parser.parse_args()
    if options.judge:
        train(options, options.judge)
        return
    with stand_in_judge() as url:
        train(options, url)


if __name__ == "__main__":
    main()
