"""Compiles grammars on trial, each in a child of its own that may be late, crash or run out of memory alone.

    python -m vllm_exl3.door.grammar_trial

The first line of standard input is xgrammar's tokenizer as JSON; then one line a trial: {"id", "parts", "timeout_s"},
parts as [kind, text]. Answers, one line each: {"id", "ended"} with "ok", "late" or "crashed". Whether a grammar is
right is not judged here: vLLM says that itself.
"""

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial

MOST_CHILDREN = 4
# vLLM turns a text into a grammar in the API server's own loop, before it compiles in another thread: that part has to
# be quick.
CONVERSION_S = 1.0
# Limits are of processor time, so that a busy machine refuses nothing; a child that sleeps is ended after a while too.
PATIENCE = 4  # times the limit
CHILD_BYTES = 2 << 30  # of address space beyond what this process has
POLL_S = 0.01


def compile_part(xgrammar, compiler, kind: str, text: str) -> bool:
    """As vLLM's xgrammar backend does; whether it went well. What xgrammar refuses goes to llguidance there, which
    compiles lazily, and what both refuse, vLLM refuses in its own words."""
    signal.setitimer(signal.ITIMER_PROF, CONVERSION_S)
    try:
        grammar = convert(xgrammar, kind, text)
    except Exception as error:
        if is_out_of_memory(error):
            return False
        try_llguidance(kind, text)
        return True
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    compiler.compile_grammar(grammar)
    return True


def convert(xgrammar, kind: str, text: str):
    if kind == "choice":
        rules = " | ".join(json.dumps(one) for one in json.loads(text))
        return xgrammar.Grammar.from_ebnf(f"root ::= {rules}")
    makers: dict[str, Callable] = {
        "json": xgrammar.Grammar.from_json_schema, "regex": xgrammar.Grammar.from_regex,
        "grammar": xgrammar.Grammar.from_ebnf, "structural_tag": xgrammar.Grammar.from_structural_tag,
    }  # fmt: skip
    return makers[kind](text)


def try_llguidance(kind: str, text: str) -> None:
    form = {"json": "json_schema", "regex": "regex", "grammar": "lark"}.get(kind)
    if form:
        import llguidance

        with contextlib.suppress(ValueError):
            llguidance.LLMatcher.validate_grammar(llguidance.grammar_from(form, text), None)


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "bad_alloc" in str(error)


def start_child(xgrammar, compiler, parts: list, timeout_s: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    went_well = False
    try:
        os.close(0)
        used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + CHILD_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (timeout_s, timeout_s + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        went_well = all(compile_part(xgrammar, compiler, kind, text) for kind, text in parts)
    finally:
        # Nothing that this process registered for its end may run in a child.
        os._exit(0 if went_well else 1)


class Trials:
    """The running children and what waits for a free place."""

    def __init__(self, start: Callable[[list, int], int], answer: Callable[[dict], None]) -> None:
        self.start, self.answer = start, answer
        self.waiting: deque[dict] = deque()
        self.running: dict[int, tuple[dict, float]] = {}  # by pid: the trial and when it is late

    def step(self) -> None:
        """Starts what may start and ends what has ended or is late."""
        while self.waiting and len(self.running) < MOST_CHILDREN:
            trial = self.waiting.popleft()
            pid = self.start(trial["parts"], trial["timeout_s"])
            self.running[pid] = (trial, time.monotonic() + PATIENCE * trial["timeout_s"])
        for pid, (trial, late_at) in list(self.running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._end(pid, trial, how_it_ended(status))
            elif time.monotonic() > late_at:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self._end(pid, trial, "late")

    def _end(self, pid: int, trial: dict, ended: str) -> None:
        del self.running[pid]
        self.answer({"id": trial["id"], "ended": ended})


def how_it_ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        return "late" if os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGXCPU) else "crashed"
    return "ok" if os.WEXITSTATUS(status) == 0 else "crashed"


def serve(source, trials: Trials) -> None:
    """Until standard input ends. Waits for lines, and for children only while there are any."""
    rest = b""
    while True:
        timeout = POLL_S if trials.running or trials.waiting else None
        if select.select([source], [], [], timeout)[0]:
            read = os.read(source.fileno(), 1 << 20)
            if not read:
                for pid in trials.running:
                    os.kill(pid, signal.SIGKILL)
                return
            *lines, rest = (rest + read).split(b"\n")
            trials.waiting.extend(json.loads(line) for line in lines if line)
        trials.step()


def main() -> None:
    os.nice(10)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its server, by the end of its input
    tokenizer = sys.stdin.buffer.raw.readline()
    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(tokenizer.decode())
    # One thread: a child of a process with threads has none of them.
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer

    def answer(said: dict) -> None:
        os.write(out, json.dumps(said).encode() + b"\n")

    answer({"id": 0, "ended": "ok"})
    serve(sys.stdin.buffer.raw, Trials(partial(start_child, xgrammar, compiler), answer))


if __name__ == "__main__":
    main()
