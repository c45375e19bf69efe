"""The local model's tokenizer: byte-level BPE on the corpus, digits one by one, GLM's special tokens.

PYTHONPATH=overlay python -m tools.local_model.tokenizer --out models/local
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.local_model.shapes import SPECIAL_TOKENS

VOCAB_SIZE = 1024
# The model writes these as text that the parsers read, so decoding must not drop them.
_TEXT_TAGS = SPECIAL_TOKENS[SPECIAL_TOKENS.index("<think>") :]
# Single digits; ", " before a digit is one piece (lists of numbers); else words with their space.
_PIECES = r"\d|, (?=\d)| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s"


def train_tokenizer(texts: list[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Deterministic for given texts. Any UTF-8 text survives encoding: every byte is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sorted(texts), trainer)
    _add_special_tokens(tokenizer, vocab_size)
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, vocab_size: int) -> None:
    ordinary, wanted = tokenizer.get_vocab_size(), vocab_size - len(SPECIAL_TOKENS)
    if ordinary != wanted:
        raise ValueError(
            f"tokenizer: the corpus yields {ordinary} ordinary tokens, the config needs {wanted}. "
            f"Give it more text or lower the vocabulary size."
        )
    tokens = [AddedToken(t, special=t not in _TEXT_TAGS, normalized=False) for t in SPECIAL_TOKENS]
    tokenizer.add_tokens(tokens)


def write_tokenizer(tokenizer: Tokenizer, path: Path, max_length: int) -> None:
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    from tools.local_model.corpus import tokenizer_texts
    from tools.local_model.shapes import text_config

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = train_tokenizer(tokenizer_texts(args.seed))
    write_tokenizer(tokenizer, args.out, text_config()["max_position_embeddings"])


if __name__ == "__main__":
    main()
