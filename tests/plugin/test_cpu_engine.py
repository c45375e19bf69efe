"""GLM-5.3 through vLLM's real engine on the CPU, unquantised, against transformers in fp32.

One engine runs in fp32, where everything but the order of sums is the same and differences are tiny;
one in bf16, whose attention cache is rounded. Both live in this process, so that tests can decide what shares a step.
"""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from engines import LIMIT, VOCAB, Engine, Reference, compare, in_process_vllm, prompts

from tools.local_model.make_random import write_random_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With a clamp that many activations reach, so that leaving it out anywhere is seen."""
    path = tmp_path_factory.mktemp("engine") / "model"
    write_random_model(path, experts=None, hidden_size=256, vocab_size=VOCAB, swiglu_limit=1.0, seed=11)
    return path


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request, model):
    with in_process_vllm():
        engine = Engine(model, request.param)
        engine.dtype = request.param
        yield engine
        del engine.llm


def test_answers_equal_transformers(engine, reference):
    asked = prompts(40, 3, 1, 17, 64, 257, 700)
    for prompt, (tokens, table) in zip(asked, engine.run(asked, tokens=16), strict=True):
        compare(reference, engine.dtype, prompt, tokens, table)


@pytest.mark.parametrize("starts", [[0, 1, 3, 3, 5], [0, 1, 1, 2, 9]])
def test_requests_that_join_running_ones_change_nothing(engine, reference, starts):
    """Steps with decoding and new prompts together; slots of finished requests are used again."""
    asked = prompts(40, 3, 100, 30, 257, seed=1)
    for prompt, (tokens, table) in zip(asked, engine.run(asked, starts, tokens=12), strict=True):
        compare(reference, engine.dtype, prompt, tokens, table)


def test_a_prompt_at_the_limit_works_and_a_longer_one_is_refused(engine, reference):
    from vllm.exceptions import VLLMValidationError

    (prompt,) = prompts(LIMIT - 4, seed=2)
    ((tokens, table),) = engine.run([prompt], tokens=4)
    compare(reference, engine.dtype, prompt, tokens, table)
    with pytest.raises(VLLMValidationError, match=f"maximum context length is {LIMIT} tokens"):
        engine.run(prompts(LIMIT + 1), tokens=1)


def test_a_wrong_answer_would_be_seen(engine, reference):
    """The bars of `compare` reject small damage: scaled logits, a shifted position, swapped tokens."""
    (prompt,) = prompts(40, seed=3)
    ((tokens, table),) = engine.run([prompt], tokens=4)
    swapped = table[:, [1, 0, *range(2, VOCAB)]]
    for damaged in ((1.05 * table).log_softmax(-1), table.roll(1, 0), swapped):
        with pytest.raises(AssertionError, match=r"mean KL|largest difference"):
            compare(reference, engine.dtype, prompt, tokens, damaged)


def test_only_the_attention_cache_rounds(engine, reference):
    """Prompts do not read it, so a bf16 engine meets the bars of an fp32 one, at near-ties of experts too."""
    asked = prompts(40, 3, 257, seed=4)
    for prompt, (tokens, table) in zip(asked, engine.run(asked, tokens=1), strict=True):
        compare(reference, "float32", prompt, tokens, table)
    with pytest.raises(AssertionError, match=r"mean KL|largest difference"):
        compare(reference, "float32", prompt, tokens, table.bfloat16().float())


ONE_THREAD = """
import sys; sys.path.insert(0, {here!r})
from engines import Engine, prompts
for tokens, table in Engine({model!r}, "float32").run(prompts(40, 100, 9), [0, 1, 2]): print("tokens", *tokens)
"""


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("engine", ["float32"], indirect=True)
def test_the_number_of_threads_does_not_matter(engine, model, two_threads):
    here = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", ONE_THREAD.format(here=here, model=str(model))],
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
        cwd=os.path.dirname(os.path.dirname(here)),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    alone = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("tokens")]
    together = [list(map(str, tokens)) for tokens, _ in engine.run(prompts(40, 100, 9), [0, 1, 2])]
    assert len(alone) == 3 and alone == together
