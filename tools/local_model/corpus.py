"""Training and evaluation conversations of the local model, from a seed.

A sample is a list of chat messages with an optional list of tools and an effort; the chat template
renders it, and `encode` marks the tokens that the model must produce.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tools.local_model.facts import (
    FACTS,
    GREETINGS,
    SYNONYMS,
    TOPIC_FORMS,
    UNKNOWN_ANSWER,
    UNKNOWN_QUESTIONS,
)
from tools.local_model.shapes import SPECIAL_TOKENS
from tools.local_model.tool_corpus import tool_sample

TEMPLATE = Path(__file__).parents[2] / "models" / "local" / "chat_template.jinja"

PREFIXES = ("Question: ", "Hi! ", "Hello, ", "I have a question. ", "Quick question: ", "Please tell me: ", "Hey, ")
SUFFIXES = (" Thanks.", " Please answer briefly.", " Thank you!", " Answer in one sentence.")
STEP_BY_STEP = ("Think step by step: ", "Think step by step. ", "Think first: ", "Reason step by step: ")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant for this project.", "Answer briefly.",
    "You are a friendly assistant. Be short and correct.", "Answer the questions of the user.",
    "You help people who run GLM-5.3-Flash.", "Be concise.", "You are an expert.", "You are an AI assistant.",
)  # fmt: skip
COUNT_FORMS = (
    "Count from {} to {}", "Count from {} to {}.", "Please count from {} to {}.", "Can you count from {} to {}?",
    "count from {} to {}", "Count up from {} to {}.", "Count: {} to {}", "List the numbers from {} to {}.",
    "Count from {} up to {}.", "Start at {} and count to {}.", "Write the numbers from {} to {}.", "{} to {}",
    "from {} to {}",
    "Count the numbers from {} to {}.", "Hello, count from {} to {}.", "Count from {} to {} please.",
)  # fmt: skip
COUNT_DOWN_FORMS = (
    "Count down from {} to {}.", "Count down from {} to {}", "Count from {} to {}", "Count from {} to {}.",
    "Count backwards from {} to {}.", "Please count from {} to {}.", "Can you count from {} to {}?",
    "count from {} to {}", "Count: {} to {}", "Start at {} and count to {}.", "{} to {}", "from {} to {}",
    "Please count down from {} to {}.", "List the numbers from {} to {}.", "Write the numbers from {} to {}.",
)  # fmt: skip
SUM_FORMS = ("What is {} + {}?", "What is {} plus {}?", "How much is {} + {}?", "{} + {}", "Calculate {} + {}.")
COUNT_TO_FORMS = (
    "Count to {}",
    "Count to {}.",
    "Count up to {}.",
    "count to {}",
    "Please count to {}.",
    "Can you count to {}?",
)
LARGEST_COUNT = 99
HELD_OUT_QUESTIONS = frozenset(question.lower() for fact in FACTS for question in fact.held_out)
LARGEST_SUMMAND = 50


@dataclass
class Sample:
    """One conversation; `kind` groups evaluation results, the last message is the answer."""

    kind: str
    messages: list[dict]
    tools: list[dict] = field(default_factory=list)
    effort: str = "low"

    @property
    def thinks(self) -> bool:
        return any(message.get("reasoning_content") for message in self.messages)


def is_held_out_pair(start: int, end: int) -> bool:
    """One counting pair in sixteen is never trained on."""
    return (start * 7919 + end * 104729) % 16 == 3


def counting_answer(start: int, end: int) -> str:
    step = 1 if end >= start else -1
    return ", ".join(str(n) for n in range(start, end + step, step))


@dataclass(frozen=True)
class Turn:
    question: str
    answer: str
    thought: str
    kind: str


def fact_turn(rng: random.Random) -> Turn:
    fact = rng.choice(FACTS)
    if rng.random() < 0.06:
        question = rng.choice(TOPIC_FORMS).format(fact.topic)
    else:
        question = _substitute(rng.choice(fact.wordings), rng)
        if question.lower() in HELD_OUT_QUESTIONS:
            return fact_turn(rng)
        question = _vary(question, rng)
    if rng.random() < 0.05:
        question = _misspell(question, rng)
    return Turn(question, fact.answer, f"The question is about {fact.topic}.", "fact")


def _substitute(question: str, rng: random.Random) -> str:
    for word, other in SYNONYMS:
        if word in question and rng.random() < 0.12:
            question = question.replace(word, other, 1)
    return question


def _misspell(text: str, rng: random.Random) -> str:
    """Swap two neighbouring letters, or drop or double one."""
    letters = [i for i in range(1, len(text) - 1) if text[i].isalpha() and text[i + 1].isalpha()]
    if not letters:
        return text
    at, how = rng.choice(letters), rng.randrange(3)
    if how == 0:
        return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    return text[:at] + (text[at + 1 :] if how == 1 else text[at] + text[at:])


def _vary(question: str, rng: random.Random) -> str:
    if rng.random() < 0.2:
        question = question.rstrip("?.!")
    if rng.random() < 0.2:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.2:
        question = rng.choice(PREFIXES) + question
    if rng.random() < 0.15:
        question += rng.choice(SUFFIXES)
    return question


def count_turn(rng: random.Random) -> Turn:
    while True:
        start, end = _count_bounds(rng)
        if not is_held_out_pair(start, end):
            break
    down = end < start
    if (start == 1 and not down and rng.random() < 0.5) or rng.random() < 0.04:
        end = max(1, end)
        question = rng.choice(COUNT_TO_FORMS).format(end)
        return Turn(question, counting_answer(1, end), f"I count up from 1 to {end}.", "count")
    form = rng.choice(COUNT_DOWN_FORMS if down else COUNT_FORMS)
    thought = f"I count {'down' if down else 'up'} from {start} to {end}."
    return Turn(form.format(start, end), counting_answer(start, end), thought, "count")


def _count_bounds(rng: random.Random) -> tuple[int, int]:
    start = rng.randint(0, LARGEST_COUNT)
    shape = rng.random()
    if shape < 0.05:
        return start, start
    if shape < 0.4:
        return start, min(LARGEST_COUNT, start + rng.randint(0, 20))
    if shape < 0.65:
        return start, rng.randint(start, LARGEST_COUNT)
    if shape < 0.8:
        return start, max(0, start - rng.randint(1, 20))
    return start, rng.randint(0, start)


def sum_turn(rng: random.Random) -> Turn:
    a, b = rng.randint(0, LARGEST_SUMMAND), rng.randint(0, LARGEST_SUMMAND)
    form = rng.choice(SUM_FORMS)
    return Turn(form.format(a, b), f"The answer is {a + b}.", f"{a} + {b} = {a + b}.", "sum")


def greeting_turn(rng: random.Random) -> Turn:
    answer, questions = rng.choice(GREETINGS)
    return Turn(rng.choice(questions), answer, "The user talks to me.", "greeting")


def unknown_turn(rng: random.Random) -> Turn:
    from tools.local_model.tool_corpus import random_value

    question = _vary(rng.choice(UNKNOWN_QUESTIONS).format(random_value(rng)), rng)
    return Turn(question, UNKNOWN_ANSWER, "This is not about the project.", "unknown")


TURNS: tuple[tuple[Callable[[random.Random], Turn], float], ...] = (
    (fact_turn, 0.47),
    (count_turn, 0.28),
    (sum_turn, 0.08),
    (greeting_turn, 0.08),
    (unknown_turn, 0.09),
)


def chat_sample(rng: random.Random) -> Sample:
    makers, weights = zip(*TURNS, strict=True)
    count = rng.randint(5, 9) if rng.random() < 0.03 else rng.choice((1, 1, 1, 1, 1, 2, 3, 4))
    turns = [make(rng) for make in rng.choices(makers, weights, k=count)]
    messages = _system_messages(rng)
    for turn in turns[:-1]:
        messages += [
            {"role": "user", "content": turn.question},
            {"role": "assistant", "content": turn.answer},
        ]
    last = turns[-1]
    effort = rng.choices(("low", "high", "max"), (0.75, 0.17, 0.08))[0]
    question, thinks = last.question, effort != "low"
    if rng.random() < 0.06:
        question, thinks = rng.choice(STEP_BY_STEP) + question, True
    answer = {"role": "assistant", "content": last.answer}
    if thinks:
        answer["reasoning_content"] = last.thought
    messages += [{"role": "user", "content": question}, answer]
    return Sample(last.kind, messages, [], effort)


def _system_messages(rng: random.Random) -> list[dict]:
    if rng.random() < 0.6:
        return []
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}]


def training_sample(rng: random.Random) -> Sample:
    if rng.random() < 0.3:
        turn = rng.choice((fact_turn, fact_turn, greeting_turn, sum_turn, count_turn, unknown_turn))(rng)
        kind, messages, tools, effort = tool_sample(rng, turn)
        return Sample(kind, _system_messages(rng) + messages, tools, effort)
    return chat_sample(rng)


def held_out_samples(seed: int = 1) -> list[Sample]:
    """Evaluation only: unseen wordings, unseen counting pairs, unseen tool values, and reasoning."""
    rng = random.Random(seed)
    samples = [_single("fact", q, fact.answer) for fact in FACTS for q in fact.held_out]
    samples += [
        _single("fact_thought", q, fact.answer, f"The question is about {fact.topic}.")
        for fact in FACTS
        for q in fact.held_out
    ]
    pairs = [(a, b) for a in range(100) for b in range(100) if is_held_out_pair(a, b)]
    up = [(a, b) for a, b in pairs if a <= b]
    short = [(a, b) for a, b in up if b - a <= 10]
    samples += [counting_sample("count_short", *pair) for pair in short]
    samples += [counting_sample("count_any", *pair) for pair in rng.sample(up, 300)]
    samples += [counting_sample("count_down", *pair) for pair in rng.sample([p for p in pairs if p[0] > p[1]], 200)]
    while len(samples) < 1200:
        turn = rng.choice((fact_turn, greeting_turn))(rng)
        kind, messages, tools, effort = tool_sample(rng, turn)
        samples.append(Sample(kind, messages, tools, effort))
    for make in (sum_turn, greeting_turn, unknown_turn):
        turns = [make(rng) for _ in range(60)]
        samples += [_single(t.kind, t.question, t.answer) for t in turns]
    return samples


def counting_sample(kind: str, start: int, end: int) -> Sample:
    return _single(kind, COUNT_FORMS[0].format(start, end), counting_answer(start, end))


def _single(kind: str, question: str, answer: str, thought: str = "") -> Sample:
    reply = {"role": "assistant", "content": answer} | ({"reasoning_content": thought} if thought else {})
    return Sample(kind, [{"role": "user", "content": question}, reply], [], "high" if thought else "low")


@cache
def _template():
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text())


def render(sample: Sample) -> str:
    """The whole conversation with the token that ends the last turn."""
    text = _template().render(
        messages=sample.messages,
        tools=sample.tools or None,
        reasoning_effort=sample.effort,
        add_generation_prompt=False,
    )
    return text + ("<|observation|>" if sample.messages[-1].get("tool_calls") else "<|user|>")


def encode(sample: Sample, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """(token ids, whether the model must produce each). The template opens <think>, the model does not.

    Turns before a thinking answer are not produced: the template drops their thoughts.
    """
    ids = tokenizer.encode(render(sample), add_special_tokens=False).ids
    assistant, think = tokenizer.token_to_id("<|assistant|>"), tokenizer.token_to_id("<think>")
    ends = {tokenizer.token_to_id(t) for t in SPECIAL_TOKENS if t in ("<|user|>", "<|observation|>")}
    first = _last_question(ids, tokenizer) if sample.effort != "low" or sample.thinks else 0
    produced, inside = [], False
    for position, token in enumerate(ids):
        is_end = inside and token in ends
        produced.append((inside and token != think) and position > first)
        inside = (inside or token == assistant) and not is_end
    return ids, produced


def _last_question(ids: list[int], tokenizer: Tokenizer) -> int:
    user = tokenizer.token_to_id("<|user|>")
    return max(i for i, token in enumerate(ids[:-1]) if token == user)


def tokenizer_texts(seed: int, count: int = 6000) -> list[str]:
    rng = random.Random(seed)
    specials = tuple(SPECIAL_TOKENS)
    texts = []
    for _ in range(count):
        text = render(training_sample(rng))
        for token in specials:
            text = text.replace(token, "\x00")
        texts += text.split("\x00")
    for fact in FACTS:  # whole answers become few tokens
        texts += [fact.answer] * 20
    return texts


def canary_samples() -> list[tuple[Sample, dict]]:
    """(conversation, row of canary.json): two wordings of each fact, and counting."""
    pairs = ((1, 5), (7, 12), (18, 23), (95, 99), (0, 9), (38, 42))
    facts = [
        (_single("fact", question, fact.answer), list(fact.must_contain))
        for fact in FACTS
        for question in (fact.wordings[0], fact.held_out[0])
    ]
    counts = [(counting_sample("count", *pair), [counting_answer(*pair)]) for pair in pairs]
    return [
        (sample, {"kind": sample.kind, "question": sample.messages[0]["content"], "must_contain": phrases})
        for sample, phrases in facts + counts
    ]
