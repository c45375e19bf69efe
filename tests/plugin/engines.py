"""Engines and comparisons that several test modules share: vLLM on the CPU against transformers in fp32."""

import contextlib
import gc

import pytest
import torch

VOCAB = 256
LIMIT = 2048


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
        self.last_logits = self.logits(*self.parts, tokens)
        table = self.last_logits.log_softmax(-1)
        assert self.margins, "no router was seen; transformers renamed its class"
        return table, torch.stack(self.margins).amin(0)


class Engine:
    def __init__(self, model, dtype: str = "bfloat16", vocab: int = VOCAB, **options) -> None:
        from vllm import LLM

        self.vocab = vocab
        self.llm = LLM(
            str(model), dtype=dtype, max_model_len=LIMIT, max_num_seqs=4, max_logprobs=vocab,
            **{"skip_tokenizer_init": True} | options,
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

    def sampling(self, tokens: int):
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=tokens, temperature=0, logprobs=self.vocab, prompt_logprobs=self.vocab, ignore_eos=True,
            detokenize=False, flat_logprobs=True,
        )  # fmt: skip

    def unpack(self, output):
        answer = output.outputs[0]
        return list(answer.token_ids), torch.cat([self.table(output.prompt_logprobs)[1:], self.table(answer.logprobs)])

    def table(self, flat) -> torch.Tensor:
        """[positions, vocabulary] of vLLM's FlatLogprobs; NaN, which no bar accepts, where it tells nothing."""
        counts = torch.tensor(flat.end_indices) - torch.tensor(flat.start_indices)
        rows = torch.arange(len(flat)).repeat_interleave(counts)
        table = torch.full((len(flat), self.vocab), float("nan"))
        table[rows, torch.tensor(flat.token_ids, dtype=torch.long)] = torch.tensor(flat.logprobs)
        return table


@contextlib.contextmanager
def in_process_vllm():
    """vLLM without child processes, so that a test sees its exceptions; cleans up what it leaves behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        gc.collect()


def prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


# Mean KL; the largest difference of a log-probability where the probability is at least 0.01; and the
# lead in an expert's score that rounding may overturn, which changes that token's answer at will.
# What a bf16 engine rounds on the CPU is the cache of its MLA layers.
BARS = {"float32": (1e-6, 1e-4, 0.0), "bfloat16": (1e-5, 0.05, 0.001)}


def compare(reference, dtype, prompt, tokens, got):
    """All positions of one finished request against the reference, teacher-forced on its tokens."""
    want, lead = (x[: len(got)] for x in reference(prompt + tokens))
    decided = lead >= BARS[dtype][2]
    _compare_tables(dtype, want, got, decided)
    _compare_choices(dtype, want[len(prompt) - 1 :], tokens, decided[len(prompt) - 1 :])


def compare_conversations(reference, conversations, tables):
    """Whole conversations (tokens) of a trained model, teacher-forced: every position, users' words included."""
    parts = []
    for tokens, got in zip(conversations, tables, strict=True):
        want, lead = (x[: len(got)] for x in reference(tokens))
        parts.append((want, got, lead >= BARS["bfloat16"][2]))
    want, got, decided = map(torch.cat, zip(*parts, strict=True))
    _compare_tables("bfloat16", want, got, decided)
    _compare_choices("bfloat16", want, got.argmax(-1).tolist(), decided)


def _compare_tables(dtype, want, got, decided):
    mean_bar, largest_bar, _ = BARS[dtype]
    divergence = (want.exp() * (want - got)).sum(-1)
    assert divergence.mean() <= mean_bar, f"mean KL {divergence.mean():.2e}"
    assert (~decided).sum() <= 1 + 0.01 * len(got), "too many near-ties of experts to judge by"
    difference = ((want - got).abs() * (want.exp() >= 0.01)).amax(-1)
    for t in (difference > largest_bar).nonzero().flatten().tolist():
        print(f"position {t}: difference {difference[t]:.3f}, experts {'decided' if decided[t] else 'nearly tied'}")
    largest = difference[decided].max()
    assert largest <= largest_bar, f"largest difference {largest:.3f}"
    print(f"{dtype}, {len(got)} positions: mean KL {divergence.mean():.1e}, largest {largest:.1e}")


def _compare_choices(dtype, want, tokens, decided):
    for step, row in enumerate(want):
        margin = float(row.max() - row[tokens[step]])
        if margin:
            print(f"near-tie of tokens: step {step} took {tokens[step]}, {margin:.4f} below the reference's choice")
        assert margin <= BARS[dtype][1] or not decided[step]
