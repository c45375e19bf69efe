"""Token streams for a plan: text that the model knows, text beyond ASCII, and a needle with its question."""

from __future__ import annotations

import json
import random
from functools import cached_property
from pathlib import Path

FOREIGN = (
    "Grüße aus Łódź, naïve façade, Ελληνικά και ελπίδα, Привет всем, これは長い文です。", "汉字与标点，测试。",
    "한국어 문장입니다.", "עברית משמאל", "العربية من اليمين", "हिन्दी वाक्य", "🙂🚀👩‍👩‍👧‍👦 e\u0301 ﷽ ½ ∑ ≠",
)  # fmt: skip
NEEDLE, QUESTION = "The word behind the door is {}. Remember it. ", " Which word is behind the door? The word is"


class Words:
    """Streams of a model's vocabulary, by kind and seed; random tokens where it has no tokenizer."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.is_trained = (model / "tokenizer.json").is_file()
        self.vocabulary = json.loads((model / "config.json").read_text())["text_config"]["vocab_size"]

    @cached_property
    def tokenizer(self):
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.model / "tokenizer.json"))

    @cached_property
    def conversations(self) -> list[tuple[list[int], list[int]]]:
        """(whole, up to where its last answer begins) of conversations that the model was not trained on."""
        from tools.local_model.corpus import encode, held_out_samples

        pairs = []
        for sample in held_out_samples()[::5]:
            ids, produced = encode(sample, self.tokenizer)
            asked = max((i for i, is_produced in enumerate(produced) if not is_produced), default=-1)
            pairs.append((ids, ids[: asked + 1]))
        return pairs

    def prefix(self, number: int, count: int) -> list[int]:
        """The first `count` tokens of shared text `number`: the same for every session that takes more or fewer."""
        choose = random.Random(f"prefix {number}")
        return self._stream(choose, count)[:count]

    def asked(self, kind: str, seed: int, count: int) -> list[int]:
        """What a user adds: `count` tokens whose end asks the model for an answer."""
        choose = random.Random(f"{kind} {seed}")
        if not self.is_trained:
            return self._stream(choose, count)
        if kind == "foreign":
            return self._encode(" ".join(choose.choice(FOREIGN) for _ in range(count)))[-count:]
        # The end matters, so what is too much goes in front.
        body = self._stream(choose, count) + choose.choice(self.conversations)[1]
        if kind == "needle":
            body += self._encode(QUESTION)
        return body[-count:]

    def needle(self, seed: int) -> list[int]:
        """What a needle's question asks about, to stand in front."""
        choose = random.Random(f"needle {seed}")
        if not self.is_trained:
            return self._stream(choose, 8)[:8]
        syllables = [choose.choice("bdfgklmnprst") + choose.choice("aeiou") for _ in range(3)]
        return self._encode(NEEDLE.format("".join(syllables)))

    def _stream(self, choose: random.Random, count: int) -> list[int]:
        if not self.is_trained:
            return [choose.randrange(self.vocabulary) for _ in range(count)]
        stream: list[int] = []
        while len(stream) < count:
            stream += choose.choice(self.conversations)[0]
        return stream

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def first_prompt(words: Words, session) -> list[int]:
    """The shared text of a session and its first question; in front the needle that one of its turns asks for."""
    turn, needles = session.turns[0], [turn for turn in session.turns if turn.kind == "needle"]
    start = words.needle(needles[0].seed) if needles else []
    shared = (start + words.prefix(session.prefix, session.shared))[: session.shared]
    return shared + words.asked(turn.kind, turn.seed, turn.asked)
