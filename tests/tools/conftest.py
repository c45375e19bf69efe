"""Puts the plugin's source on the path: these tests need its format module, not an installed vLLM."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
for folder in (ROOT, ROOT / "overlay"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

torch = pytest.importorskip("torch")


@pytest.fixture(scope="session")
def local_model() -> Path:
    return ROOT / "models" / "local"


@pytest.fixture(scope="session")
def reference(local_model):
    """(transformers model, lm_head, tokenizer) of the shipped model."""
    from tokenizers import Tokenizer

    from tools.local_model.reference import load_reference

    return (*load_reference(local_model), Tokenizer.from_file(str(local_model / "tokenizer.json")))
