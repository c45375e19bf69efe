"""One engine of the proof, in a process of its own: starts vLLM, answers prompts, writes what it said.

python arm.py '{"name": ..., "model": ..., "out": ..., "options": {...}, "oracle": true, "tables": true}'
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # FlashInfer would compile it first
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}
# torch.compile's cache under the home folder, where tools/gpu/caches.py finds it, and not in /tmp: for what is compiled
# before vLLM names a folder of its own, which it does not where the model itself is not compiled.
INDUCTOR = ".cache/inductor"

MAX_LENGTH = 4096
TOKENS = 16  # new ones of each request
BESIDES = 8  # log-probabilities of other tokens, to tell a near-tie
# Steps of one row, of few rows, of both kernels side by side, and of the grouped kernel almost alone.
LENGTHS = (5, 40, 700, 17, 130, 1, 300, 1500)
AT_ONCE = (1, 2, 4, 8)
TABLE_LENGTHS = (3, 40, 130, 300)
# Of every engine, where its options do not say otherwise.
DEFAULTS = {
    "dtype": "bfloat16", "max_model_len": MAX_LENGTH, "max_num_seqs": 8, "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.1, "enable_prefix_caching": False, "skip_tokenizer_init": True, "seed": 0,
    "kernel_config": {"enable_flashinfer_autotune": False}, "additional_config": {"kda_prefill_backend": "triton"},
    "scheduler_cls": "vllm_exl3.guards.chunk_ends.scheduler",
}  # fmt: skip
COUNTERS = {"drafts": "drafts", "drafted": "draft_tokens", "accepted": "accepted_tokens"}


def settle_environment() -> None:
    """Of this process and those that it starts. A cache that the caller named stays.

    Comes before vLLM and torch's compiler are imported: they read it then, and torch names a folder of its own.
    """
    os.environ |= ENVIRONMENT
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / INDUCTOR))


def prompts(model: Path, lengths, seed: int) -> list[list[int]]:
    """Random tokens; for a trained model its own conversations, since others leave it undecided."""
    if not (model / "tokenizer.json").is_file():
        vocab, generator = vocabulary(model), torch.Generator().manual_seed(seed)
        return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]
    stream = [token for one in conversations(model)[seed::3] for token in one]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [stream[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def conversations(model: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    from tools.local_model.corpus import encode, held_out_samples

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [encode(sample, tokenizer)[0] for sample in held_out_samples()]


def questions(model: Path) -> list[list[int]]:
    """Held-out conversations up to where the last answer begins."""
    from tokenizers import Tokenizer

    from tools.local_model.corpus import encode
    from tools.local_model.own_text import measured_samples

    tokenizer, asked = Tokenizer.from_file(str(model / "tokenizer.json")), []
    for sample in measured_samples():
        ids, produced = encode(sample, tokenizer)
        end = max(i for i, is_produced in enumerate(produced) if not is_produced)
        asked.append(ids[: end + 1])
    return asked


def vocabulary(model: Path) -> int:
    return json.loads((model / "config.json").read_text())["text_config"]["vocab_size"]


def table_prompts(model: Path) -> list[list[int]]:
    if (model / "tokenizer.json").is_file():
        return conversations(model)[::101]
    return prompts(model, TABLE_LENGTHS, seed=2)


def start(model: str, options: dict):
    import vllm_exl3
    from vllm import LLM
    from vllm.model_executor.layers import logits_processor
    from vllm.platforms import current_platform

    vllm_exl3.register()
    # The candidates of a DFlash2 draft: FlashInfer would compile its top-k first, torch's gives the same. On a Spark
    # `image warm` has compiled it, and what the product uses is what counts. Ranks are other processes, and keep it.
    assert callable(logits_processor._flashinfer_topk), "vLLM chooses its top-k otherwise now"
    if current_platform.get_device_capability().major != 12:
        logits_processor._flashinfer_topk = lambda: None
    return LLM(model, **DEFAULTS | {"disable_log_stats": "speculative_config" not in options} | options)


def sampling(**more):
    from vllm import SamplingParams

    return SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True} | more, temperature=0, detokenize=False)


def answers(llm, asked: list[list[int]]) -> dict[str, list]:
    """Requests at once -> per request its tokens and, at each step, the most likely ones' log-probabilities."""
    return {str(count): said_to(llm, asked[:count]) for count in AT_ONCE}


def said_to(llm, asked: list[list[int]], **more) -> list[dict]:
    prompts = [{"prompt_token_ids": prompt} for prompt in asked]
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [{str(t): row[t].logprob for t in row} for row in output.outputs[0].logprobs],
        }
        for output in llm.generate(prompts, sampling(logprobs=BESIDES, **more), use_tqdm=False)
    ]


def own_text(llm, model: Path) -> list[dict]:
    """The trained model's whole answers to questions that it knows: what its drafts were trained to foresee."""
    from tools.local_model.own_text import ANSWER_TOKENS

    ends = json.loads((model / "config.json").read_text())["eos_token_id"]
    return said_to(llm, questions(model), max_tokens=ANSWER_TOKENS, ignore_eos=False, stop_token_ids=ends)


def acceptance(llm) -> dict:
    """vLLM's own counters since the engine's start: steps with drafts, tokens drafted, accepted, by position."""
    found = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in llm.get_metrics()}
    counts = {ours: found[name].value for ours, name in COUNTERS.items()}
    return counts | {"by_position": list(found["accepted_tokens_per_pos"].values)}


def counted(llm, talk) -> tuple[list | dict, dict]:
    """(what talk(llm) says, the acceptance while it was said)."""
    before, said = acceptance(llm), talk(llm)
    after = acceptance(llm)
    positions = [n - m for n, m in zip(after.pop("by_position"), before.pop("by_position"), strict=True)]
    return said, {name: after[name] - before[name] for name in after} | {"by_position": positions}


def tables(llm, asked: list[list[int]], vocab: int) -> list[dict]:
    """Per prompt all its tokens, and the log-probabilities [positions, vocabulary] from the second token on."""
    result = []
    every = sampling(logprobs=vocab, prompt_logprobs=vocab)
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in asked], every, use_tqdm=False):
        rows = output.prompt_logprobs[1:] + output.outputs[0].logprobs
        table = torch.tensor([[row[token].logprob for token in range(vocab)] for row in rows])
        result.append({"tokens": output.prompt_token_ids + list(output.outputs[0].token_ids), "table": table})
    return result


class Clock:
    def __init__(self, name: str) -> None:
        self.name, self.begin = name, time.monotonic()

    def say(self, what: str) -> None:
        print(f"{self.name}: {time.monotonic() - self.begin:6.1f} s  {what}", flush=True)


def main() -> None:
    settle_environment()
    arm = json.loads(sys.argv[1])
    clock, out = Clock(arm["name"]), Path(arm["out"])
    model = Path(arm["model"])
    vocab, asked = vocabulary(model), prompts(model, LENGTHS, seed=1)
    llm = start(arm["model"], arm["options"] | ({"max_logprobs": vocab} if arm.get("tables") else {}))
    clock.say("engine is up")
    said = {"kernels": answers(llm, asked)}
    clock.say(f"answered {', '.join(map(str, AT_ONCE))} requests at once")
    again = answers(llm, asked)
    said["repeats"] = [n for n in said["kernels"] if again[n] != said["kernels"][n]]
    clock.say("answered them again")
    drafts = "speculative_config" in arm["options"]
    if drafts:
        _, said["acceptance"] = counted(llm, lambda llm: answers(llm, asked))
    if arm.get("own_text"):
        if drafts:
            said["own_text"], said["acceptance"] = counted(llm, lambda llm: own_text(llm, model))
        else:
            said["own_text"] = own_text(llm, model)
        clock.say(f"answered {len(said['own_text'])} questions")
    if arm.get("tables"):
        torch.save(tables(llm, table_prompts(model), vocab), out / f"{arm['name']}.tables.pt")
        clock.say("gave its tables")
    if arm.get("oracle"):
        import oracle_mode

        oracle_mode.install()
        said["oracle"] = answers(llm, asked)
        clock.say("answered through the PyTorch decoder")
        if arm.get("tables"):
            torch.save(tables(llm, table_prompts(model), vocab), out / f"{arm['name']}.oracle.tables.pt")
    (out / f"{arm['name']}.json").write_text(json.dumps(said))
    clock.say("done")
    os._exit(0)  # nothing that vLLM does at exit is part of the proof


if __name__ == "__main__":
    main()
