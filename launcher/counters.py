"""The server's counters: vLLM's, and the plugin's of answers that repeat themselves. Pure but for `fetch`."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator, Mapping

from launcher import canary

SAMPLE = re.compile(r"^((?:vllm|exl3):\w+)(?:\{(.*)\})? ([0-9.eE+-]+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

WRITTEN = "vllm:generation_tokens_total"
# Tokens of a prompt are counted when all of it is read; until then the cache alone grows, step by step.
PROGRESS = (WRITTEN, "vllm:prompt_tokens_total", "vllm:kv_cache_usage_perc")
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
PREEMPTED = "vllm:num_preemptions_total"
ASKED, FOUND = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
CACHE = "vllm:cache_config_info"
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
# Of the plugin's endpoint (overlay/vllm_exl3/answers.py).
ANSWERING, REPEATING = "exl3:answers_running", "exl3:answers_repeating"
ANSWERED, REPEATED = "exl3:answers_ended_total", "exl3:answers_ended_repeating_total"
UNREAD = "exl3:responses_unread_total"


class Counters(dict[str, float]):
    """Sums over the labels by name, and the samples that they were made from."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self.samples = [(name, dict(LABEL.findall(labels)), float(value))
                        for name, labels, value in SAMPLE.findall(text)]  # fmt: skip
        for name, _, value in self.samples:
            self[name] = self.get(name, 0.0) + value

    def of(self, name: str) -> float:
        return self.get(name, 0.0)

    def labels(self, name: str) -> Mapping[str, str]:
        """Those of the first sample of that name."""
        return next((labels for found, labels, _ in self.samples if found == name), {})


def fetch(host: str, port: int, key: str) -> Counters | None:
    """None where the server does not tell. `key`: the API key or the start's token; a keyless server needs none."""
    try:
        code, body = canary.request(port, "GET", "/metrics", headers=canary.headers_with(key), host=host)
    except (OSError, http.client.HTTPException):
        return None
    return Counters(body.decode(errors="replace")) if code == 200 else None


def is_stuck(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    """Requests run, and nothing was read or written between two looks."""
    moved = any(after.get(name, 0) != before.get(name, 0) for name in PROGRESS)
    return bool(before.get(RUNNING) and after.get(RUNNING)) and not moved


# For `status`


def rows(counters: Counters) -> Iterator[tuple[str, str]]:
    yield "cache", cache_row(counters)
    yield "drafts", drafts_row(counters)
    yield "loops", loops_row(counters)


def progress_row(counters: Counters) -> str:
    running, waiting, written, preempted = map(counters.of, (RUNNING, WAITING, WRITTEN, PREEMPTED))
    return (
        f"{running:.0f} running, {waiting:.0f} waiting, {written:.0f} tokens written, {preempted:.0f} times set back "
        f"for lack of cache"
    )


def has_prefix_cache(counters: Counters) -> bool:
    return counters.labels(CACHE).get("enable_prefix_caching") == "True"


def block_tokens(counters: Counters) -> int:
    """The unit of a hit: a state of the linear attention layers is kept once per block. 0 where it is not told."""
    sizes = (counters.labels(CACHE).get(name, "") for name in ("block_size", "mamba_block_size"))
    return max((int(size) for size in sizes if size.isdigit()), default=0)


def cache_row(counters: Counters) -> str:
    if not has_prefix_cache(counters):
        return "off" if counters.labels(CACHE) else "not told"
    asked, unit = counters.of(ASKED), f"a hit is whole blocks of {block_tokens(counters):,} tokens"
    found = f"{percent(counters.of(FOUND), asked)} % of {asked:,.0f} prompt tokens found" if asked else "not asked yet"
    return f"{found}; {unit}"


def drafts_row(counters: Counters) -> str:
    if DRAFTED not in counters:
        return "none"
    if not counters.of(DRAFTED):
        return "nothing drafted yet"
    at = {int(labels["position"]): value for name, labels, value in counters.samples if name == ACCEPTED_AT}
    by_position = " ".join(percent(at[position], counters.of(DRAFTS)) for position in sorted(at))
    share = percent(counters.of(ACCEPTED), counters.of(DRAFTED))
    return f"{share} % of {counters.of(DRAFTED):,.0f} tokens accepted; by position {by_position} %"


def loops_row(counters: Counters) -> str:
    if ANSWERING not in counters:
        return "not told: the plugin inside does not watch answers"
    repeating, running, repeated, ended = map(counters.of, (REPEATING, ANSWERING, REPEATED, ANSWERED))
    now = f"{repeating:.0f} of {running:.0f} running answers repeat a short cycle"
    unread = f"; {counters.of(UNREAD):.0f} could not be read" if counters.of(UNREAD) else ""
    return f"{now}, {repeated:.0f} of {ended:.0f} ended so{unread}"


def numbers(counters: Counters) -> Mapping[str, object]:
    """What the rows above say, for programs. None: the server has no such thing, or does not tell."""

    def count(name: str) -> int | None:
        return round(counters[name]) if name in counters else None

    at = sorted((int(labels["position"]), round(value)) for name, labels, value in counters.samples
                if name == ACCEPTED_AT)  # fmt: skip
    return {
        "requests_running": count(RUNNING), "requests_waiting": count(WAITING), "tokens_written": count(WRITTEN),
        "preemptions": count(PREEMPTED),
        "prefix_cache": None if not has_prefix_cache(counters) else {
            "prompt_tokens": count(ASKED), "found_tokens": count(FOUND), "block_tokens": block_tokens(counters),
        },
        "drafts": None if DRAFTED not in counters else {
            "drafts": count(DRAFTS), "drafted_tokens": count(DRAFTED), "accepted_tokens": count(ACCEPTED),
            "accepted_by_position": [value for _, value in at],
        },
        "loops": None if ANSWERING not in counters else {
            "answers_running": count(ANSWERING), "answers_repeating": count(REPEATING),
            "answers_ended": count(ANSWERED), "answers_ended_repeating": count(REPEATED),
            "responses_unread": count(UNREAD),
        },
    }  # fmt: skip


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}" if whole else "-"
