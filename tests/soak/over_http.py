"""The soak's second mode: a plan over the API of a running server, judged by the same server or another one.

    PYTHONPATH=overlay:. python tests/soak/over_http.py --url http://127.0.0.1:8888/v1 --model models/local

The judge reads each session whole, alone and under a cache salt of its own: nothing from the prefix cache, and a prompt
is never drafted. What it reads is cut into the server's chunks. The floor comes from answers asked the same way. Who
shares a step with whom depends on the clock here, so a seed repeats the questions and not the steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1])]

import judge
import sessions
import shapes
from judge import Answer
from openai import AsyncOpenAI, OpenAIError
from report_file import report_file
from words import Words, first_prompt

STEP_S = 0.02  # of a plan's step
TELL_EVERY_S = 10
NO_VERDICT = 3


class Telling:
    """Counts what is done, and says so once in a while."""

    def __init__(self) -> None:
        self.begin = self.told = time.monotonic()
        self.done: dict[str, int] = {}

    def __call__(self, what: str, total: int) -> None:
        self.done[what] = self.done.get(what, 0) + 1
        now = time.monotonic()
        if now - self.told >= TELL_EVERY_S:
            self.told = now
            print(f"{now - self.begin:6.1f} s  {what}: {self.done[what]} of {total}", flush=True)


class Api:
    """One server's /v1, asked in tokens."""

    def __init__(self, url: str, key: str, timeout_s: float = 600) -> None:
        self.client = AsyncOpenAI(base_url=url, api_key=key or "none", max_retries=0, timeout=timeout_s)
        self.model = None

    async def name(self) -> str:
        if self.model is None:
            self.model = (await self.client.models.list()).data[0].id
        return self.model

    async def say(self, prompt: list[int], tokens: int, logprobs: bool, salt: str | None) -> tuple:
        """(tokens of the answer, tokens of the prompt from the cache or None if not told, whether there was a NaN)."""
        said, cached, nan = [], None, False
        more = {"ignore_eos": True, "return_token_ids": True} | ({"cache_salt": salt} if salt else {})
        stream = await self.client.completions.create(
            model=await self.name(), prompt=prompt, max_tokens=tokens, temperature=0, stream=True, extra_body=more,
            stream_options={"include_usage": True}, **({"logprobs": 0} if logprobs else {}),
        )  # fmt: skip
        async with stream:  # a stream that is left is what the server takes for an abort
            async for event in stream:
                for choice in event.choices:
                    said += choice.token_ids or []
                    values = choice.logprobs.token_logprobs if choice.logprobs else []
                    nan |= any(value is None or math.isnan(value) for value in values or [])
                details = event.usage and event.usage.prompt_tokens_details
                cached = details.cached_tokens if details else cached
        return said, cached, nan

    async def read(self, tokens: list[int]) -> list[dict | None]:
        """As `read` of judge.score."""
        more = {"prompt_logprobs": 1, "cache_salt": secrets.token_hex(8)}
        reply = await self.client.completions.create(
            model=await self.name(), prompt=tokens, max_tokens=1, temperature=0, extra_body=more
        )
        rows = reply.choices[0].prompt_logprobs
        return [row and {int(t): value["logprob"] for t, value in row.items()} for row in rows]


async def converse(
    api: Api, words: Words, session: sessions.Session, cold: bool = False, tell: Callable[[], None] = lambda: None
) -> list[Answer]:
    """All turns of a session, with its pauses and what it takes back; `cold`: at once and without the cache."""
    answers, prompt = [], first_prompt(words, session)
    for number, turn in enumerate(session.turns):
        if number:
            prompt = answers[-1].whole + words.asked(turn.kind, turn.seed, turn.asked)
        if not cold:
            await asyncio.sleep(turn.wait * STEP_S)
            await _abort(api, prompt, turn, session.logprobs)
        salt = secrets.token_hex(8) if cold else None
        said, cached, nan = await api.say(prompt, turn.answer, session.logprobs, salt)
        if len(said) != turn.answer:
            raise RuntimeError(f"{session.name} turn {number}: {len(said)} tokens came, {turn.answer} were asked for.")
        answers.append(Answer(session.name, number, prompt, said, cached, nan, turn.edge))
        tell()
    return answers


async def _abort(api: Api, prompt: list[int], turn: sessions.Turn, logprobs: bool) -> None:
    """Ask and go away in the middle, if the turn says so and the server is not faster."""
    if turn.abort is not None:
        try:
            await asyncio.wait_for(api.say(prompt, turn.answer, logprobs, None), turn.abort * STEP_S)
        except asyncio.TimeoutError:
            await asyncio.sleep(turn.retry * STEP_S)


async def soak(api: Api, reader: Api, words: Words, plan: sessions.Plan, alone: int = 4, shaped: int = 0) -> dict:
    """The verdict on all of a plan at once, with `shaped` answers of each shape beside it.

    Raises ValueError where the server is wrong even alone and cold.
    """
    telling = Telling()
    turns = partial(telling, "turns answered in company", plan.turns)
    talks = (converse(api, words, session, tell=turns) for session in plan.sessions)
    faults, *together = await asyncio.gather(shapes.faults(api.client, await api.name(), shaped), *talks)
    first = plan.sessions[:alone]
    turns = partial(telling, "turns answered alone", sum(len(session.turns) for session in first))
    cold = [await converse(api, words, session, cold=True, tell=turns) for session in first]
    read = partial(telling, "sessions judged", len(cold) + len(together))
    floor = judge.floor(await score(reader, cold, read))
    return judge.verdict(await score(reader, together, read), judge.TIMES_THE_FLOOR * floor) | {"misshapen": faults}


async def score(reader: Api, talks: list[list[Answer]], tell: Callable[[], None] = lambda: None) -> list[judge.Scored]:
    scored = []
    for answers in talks:
        read = {tuple(whole): await reader.read(whole) for whole, _ in judge.longest_only(answers)}
        scored += judge.score(lambda whole, read=read: read[tuple(whole)], answers)
        tell()
    return scored


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of the server's API, with /v1; VLLM_API_KEY is its key")
    parser.add_argument("--judge", help="of another server of the same model; otherwise the same one judges")
    parser.add_argument("--model", type=Path, required=True, help="folder with the model's tokenizer and config.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sessions", type=int, default=30)
    parser.add_argument("--plan", type=Path, help="a plan as a file, in place of seed and sessions")
    parser.add_argument("--block", type=int, default=256, help="tokens of a state block; the server's log tells")
    parser.add_argument("--chunk", type=int, default=2048, help="the server's max_num_batched_tokens")
    parser.add_argument("--longest", type=int, default=2048, help="the server's max_model_len")
    parser.add_argument("--shaped", type=int, default=5, help="tool calls and JSON after thinking beside them")
    parser.add_argument("--seconds", type=float, help="after so long there is no verdict; otherwise it takes its time")
    parser.add_argument("--report", type=report_file, default="soak-http.json")
    args = parser.parse_args(argv)
    if args.plan:
        try:
            plan = sessions.from_json(args.plan.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"--plan {args.plan}: {error}")
    else:
        # The judge asks for one token more than a session has.
        edges = sessions.Edges(args.block, args.chunk, args.longest - 1)
        plan = sessions.make_plan(args.seed, args.sessions, edges)
    key = os.environ.get("VLLM_API_KEY", "")
    print(f"{len(plan.sessions)} sessions, {plan.turns} turns", flush=True)
    whole = soak(Api(args.url, key), Api(args.judge or args.url, key), Words(args.model), plan, shaped=args.shaped)
    try:
        said = asyncio.run(asyncio.wait_for(whole, args.seconds))
    except asyncio.TimeoutError:
        print(f"{args.url}: no verdict in {args.seconds:.0f} s; fewer --sessions are faster.", file=sys.stderr)
        return NO_VERDICT
    except (OpenAIError, ValueError, RuntimeError) as error:
        print(f"{args.url}: no verdict: {error} Is a server of this model running there?", file=sys.stderr)
        return NO_VERDICT
    args.report.write_text(json.dumps(said | {"plan": json.loads(sessions.to_json(plan))}, indent=1) + "\n")
    found = [one["text"] for one in said["findings"]] + said["misshapen"]
    if not said["hits"]:
        print("NOTE no prompt came from the prefix cache, so that nothing is said of it", flush=True)
    print(*found, f"{said['turns']} turns, {said['hits']} hits, {len(found)} findings: {args.report}", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
