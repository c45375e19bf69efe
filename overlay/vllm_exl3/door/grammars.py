"""Grammars are compiled on trial before vLLM sees them, so that one that takes for ever stalls nobody else.

vLLM converts a grammar in the API server's own loop and compiles it in threads that all clients share. The trial is a
process beside the server (grammar_trial.py).
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import sys
from collections import OrderedDict
from collections.abc import Callable

from vllm_exl3.door.asked import Part
from vllm_exl3.door.errors import Refusal
from vllm_exl3.door.rules import Rules

REMEMBERED = 4096  # grammars that have passed
START_S = 120  # torch and xgrammar are imported
PROGRAM = (sys.executable, "-m", "vllm_exl3.door.grammar_trial")


class GrammarTrials:
    """`tokenizer` gives xgrammar's tokenizer as JSON; it is called once, in a thread."""

    def __init__(self, tokenizer: Callable[[], str], rules: Rules) -> None:
        self.tokenizer, self.rules = tokenizer, rules
        self.passed: OrderedDict[bytes, None] = OrderedDict()
        self.waiting: dict[int, asyncio.Future[str]] = {}
        self.numbers = itertools.count(1)
        self.process: asyncio.subprocess.Process | None = None
        self.starting: asyncio.Task | None = None
        self.reading: asyncio.Task | None = None

    async def check(self, parts: list[Part]) -> None:
        """Raises Refusal for a grammar that is not compiled in time."""
        new = {self._digest(part): part for part in parts}
        for known in [one for one in new if one in self.passed]:
            self.passed.move_to_end(known)
            del new[known]
        if not new:
            return
        ended = await self._try(list(new.values()))
        if ended != "ok":
            raise self._refusal(ended)
        self.passed.update(dict.fromkeys(new))
        while len(self.passed) > REMEMBERED:
            self.passed.popitem(last=False)

    def start(self) -> asyncio.Task:
        """Begins to bring the process up, unless it is there; a first grammar then finds it ready."""
        if self.starting is None or (self.starting.done() and not self._is_up()):
            self.starting = asyncio.create_task(self._start())
        return self.starting

    async def _try(self, parts: list[Part]) -> str:
        try:
            await asyncio.wait_for(asyncio.shield(self.start()), START_S)
            number, result = next(self.numbers), asyncio.get_running_loop().create_future()
            self.waiting[number] = result
            try:
                trial = {"id": number, "parts": parts, "timeout_s": self.rules.grammar_timeout_s}
                self.process.stdin.write(json.dumps(trial).encode() + b"\n")
                await self.process.stdin.drain()
                return await result
            finally:
                self.waiting.pop(number, None)
        except (OSError, TimeoutError, RuntimeError) as error:
            raise Refusal(
                503, "grammar_check_down",
                f"Grammars cannot be checked now ({error or type(error).__name__}), so none is taken; try again, and "
                f"look at the server's log.",
            ) from error  # fmt: skip

    def _refusal(self, ended: str) -> Refusal:
        limit = self.rules.grammar_timeout_s
        late = f"takes too long to compile (at most {limit} s of processor time, and 1 s to read it)"
        how = {"late": late, "crashed": "exhausts or crashes the compiler"}[ended]
        return Refusal(
            400, "grammar_too_complex",
            f"The grammar (tools, response format or structured output) {how}; simplify its repetitions and patterns, "
            f"or raise GRAMMAR_TIMEOUT_S.",
        )  # fmt: skip

    @staticmethod
    def _digest(part: Part) -> bytes:
        return hashlib.sha256(json.dumps(part).encode()).digest()

    def _is_up(self) -> bool:
        return bool(self.starting and self.starting.done() and not self.starting.cancelled()
                    and not self.starting.exception() and self.process.returncode is None)  # fmt: skip

    async def _start(self) -> None:
        tokenizer = await asyncio.to_thread(self.tokenizer)
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(*PROGRAM, stdin=pipe, stdout=pipe)
        self.process.stdin.write(tokenizer.encode() + b"\n")
        if not await self.process.stdout.readline():
            raise RuntimeError(f"its process ended with exit code {await self.process.wait()}")
        self.reading = asyncio.create_task(self._read(self.process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        while line := await process.stdout.readline():
            said = json.loads(line)
            result = self.waiting.get(said["id"])
            if result and not result.done():
                result.set_result(said["ended"])
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        for result in self.waiting.values():
            if not result.done():
                result.set_exception(RuntimeError("its process has ended"))
