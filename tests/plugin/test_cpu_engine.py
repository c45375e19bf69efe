"""GLM-5.3 through vLLM's real engine on the CPU, unquantised, against transformers in fp32.

One engine runs in fp32, where everything but the order of sums is the same and differences are tiny;
one in bf16, as on a GPU. Both live in this process, so that tests can decide what shares a step.
"""

import gc
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("vllm")

from tools.local_model.make_random import write_random_model

VOCAB = 256
LIMIT = 2048


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With a clamp that many activations reach, so that leaving it out anywhere is seen."""
    path = tmp_path_factory.mktemp("engine") / "model"
    write_random_model(path, experts=None, hidden_size=256, vocab_size=VOCAB, swiglu_limit=1.0, seed=11)
    return path


class Reference:
    """transformers in fp32, which also tells how close each token's choice of experts was."""

    def __init__(self, model) -> None:
        from tools.local_model import reference

        self.logits = reference.reference_logits
        self.parts = reference.load_reference(model)
        self.margins = []
        for module in self.parts[0].modules():
            if type(module).__name__ == "Glm5NextTextTopkRouter":
                module.register_forward_hook(self.record)

    def record(self, router, _inputs, outputs) -> None:
        scores = outputs[0].sigmoid() + router.e_score_correction_bias
        ordered = scores.sort(-1, descending=True).values
        self.margins.append(ordered[:, router.top_k - 1] - ordered[:, router.top_k])

    def __call__(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Per position: log-probabilities, and the smallest lead of a chosen expert over the next one."""
        self.margins.clear()
        table = self.logits(*self.parts, tokens).log_softmax(-1)
        assert self.margins, "no router was seen; transformers renamed its class"
        return table, torch.stack(self.margins).amin(0)


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model)


class Engine:
    def __init__(self, model, dtype: str) -> None:
        from vllm import LLM

        self.llm = LLM(
            str(model), skip_tokenizer_init=True, dtype=dtype, max_model_len=LIMIT, max_num_seqs=4,
            max_logprobs=VOCAB,
        )  # fmt: skip

    def run(self, prompts, starts=None, tokens=8):
        """Greedy; prompt i joins before step starts[i]. Returns per prompt the new tokens and the
        log-probabilities [positions, vocabulary] from the prompt's second token on."""
        engine, starts = self.llm.llm_engine, starts or [0] * len(prompts)
        waiting, finished, step = list(range(len(prompts))), {}, 0
        while waiting or engine.has_unfinished_requests():
            for i in [i for i in waiting if starts[i] <= step]:
                waiting.remove(i)
                engine.add_request(str(i), {"prompt_token_ids": prompts[i]}, self.sampling(tokens))
            for output in engine.step():
                if output.finished:
                    finished[int(output.request_id.split("-")[0])] = output
            step += 1
        return [self.unpack(finished[i]) for i in range(len(prompts))]

    @staticmethod
    def sampling(tokens: int):
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=tokens, temperature=0, logprobs=VOCAB, prompt_logprobs=VOCAB, ignore_eos=True, detokenize=False
        )

    @staticmethod
    def unpack(output):
        rows = output.prompt_logprobs[1:] + output.outputs[0].logprobs
        table = torch.tensor([[row[token].logprob for token in range(VOCAB)] for row in rows])
        return list(output.outputs[0].token_ids), table


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request, model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        engine = Engine(model, request.param)
        engine.dtype = request.param
        yield engine
        del engine.llm
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        gc.collect()


def prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


# Mean KL; the largest difference of a log-probability where the probability is at least 0.01; and the
# lead in an expert's score that rounding may overturn, which changes that token's answer at will.
BARS = {"float32": (1e-6, 1e-4, 0.0), "bfloat16": (1e-3, 0.05, 0.01)}


def compare(reference, dtype, prompt, tokens, got):
    """All positions of one finished request against the reference, teacher-forced on its tokens."""
    mean_bar, largest_bar, expert_lead = BARS[dtype]
    want, lead = (x[: len(got)] for x in reference(prompt + tokens))
    divergence = (want.exp() * (want - got)).sum(-1)
    assert divergence.mean() <= mean_bar, f"mean KL {divergence.mean():.2e}"

    decided = lead >= expert_lead
    assert (~decided).sum() <= 1 + 0.02 * len(got), "too many near-ties of experts to judge by"
    difference = ((want - got).abs() * (want.exp() >= 0.01)).amax(-1)
    for t in (difference > largest_bar).nonzero().flatten().tolist():
        print(f"near-tie of experts: position {t}, lead {lead[t]:.4f}, difference {difference[t]:.3f}")
    assert difference[decided].max() <= largest_bar, f"largest difference {difference[decided].max():.3f}"

    for step, row in enumerate(want[len(prompt) - 1 :]):
        margin = float(row.max() - row[tokens[step]])
        if margin:
            print(f"near-tie of tokens: step {step} took {tokens[step]}, {margin:.4f} below the reference's choice")
        assert margin <= largest_bar or not decided[len(prompt) - 1 + step]
    print(f"{dtype}, {len(got)} positions: mean KL {divergence.mean():.1e}, largest {difference[decided].max():.1e}")


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
        with pytest.raises(AssertionError):
            compare(reference, engine.dtype, prompt, tokens, damaged)


OTHER_THREADS = """
import sys; sys.path.insert(0, {here!r})
from test_cpu_engine import Engine, prompts
for tokens, table in Engine({model!r}, "float32").run(prompts(40, 100, 9), [0, 1, 2]): print("tokens", *tokens)
"""


def test_the_number_of_threads_does_not_matter(model):
    here = os.path.dirname(__file__)
    answers = []
    for threads in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", OTHER_THREADS.format(here=here, model=str(model))],
            env=os.environ
            | {
                "OMP_NUM_THREADS": threads,
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
        answers.append([line for line in done.stdout.splitlines() if line.startswith("tokens")])
    assert len(answers[0]) == 3 and answers[0] == answers[1]
