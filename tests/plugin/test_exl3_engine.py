"""EXL3 through vLLM's real engine against transformers with the decoded weights in fp32."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from engines import VOCAB, Engine, Reference, compare, compare_conversations, in_process_vllm, prompts
from safetensors.torch import load_file, save_file
from variants import write_all_exl3
from vllm_exl3 import reference as exl3_reference
from vllm_exl3.format import HADAMARD_BLOCK, TILE

from launcher.canary import Answer, fault, questions_for_start
from tools.local_model.corpus import encode, held_out_samples
from tools.local_model.make_random import write_random_model

ROOT = Path(__file__).parent.parent.parent
LOCAL = ROOT / "models" / "local"

MODELS = {
    "experts at 3 bits, MUL1": {"experts": "mul13"},
    "experts at 2.5 bits, vision namespace": {"experts": "mul12.5", "namespace": "vl"},
    "everything, one rate a matrix": {
        "experts": "3inst5",
        "all_exl3": True,
        "dense": {"layers.0.mlp.gate_proj": "mul13.5", "layers.*.self_attn.o_proj": "mcg8", "lm_head": "mul16"},
    },
}


def text_only(path) -> dict:
    """A vision checkpoint needs a tokenizer, even if no picture ever comes."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((LOCAL / name).read_bytes())
    return {"limit_mm_per_prompt": {"image": 0, "video": 0}, "skip_tokenizer_init": False}


@pytest.mark.parametrize("name", MODELS)
def test_random_models_equal_transformers(tmp_path, name):
    write_random_model(tmp_path, hidden_size=256, vocab_size=VOCAB, swiglu_limit=1.0, seed=12, **MODELS[name])
    options = text_only(tmp_path) if MODELS[name].get("namespace") == "vl" else {}
    reference, asked = Reference(tmp_path), prompts(40, 3, 130)
    with in_process_vllm():
        for prompt, (tokens, table) in zip(asked, Engine(tmp_path, **options).run(asked), strict=True):
            compare(reference, "bfloat16", prompt, tokens, table)


# The local model


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(LOCAL)


@pytest.fixture(scope="module")
def all_exl3(tmp_path_factory):
    """The local model with attention, shared experts, dense MLP and head as EXL3 too."""
    path = tmp_path_factory.mktemp("all-exl3") / "model"
    write_all_exl3(LOCAL, path)
    return path


def chat(tokenizer, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def start_prompts(tokenizer) -> list[list[int]]:
    return [chat(tokenizer, question.question) for question in questions_for_start(LOCAL / "canary.json")]


def held_out_conversations(tokenizer) -> list[list[int]]:
    """Conversations that the model was not trained on."""
    return [encode(sample, tokenizer.backend_tokenizer)[0] for sample in held_out_samples()[::23]]


def answered(asked, answers) -> list[list[int]]:
    """The conversations that an engine's answers make of prompts."""
    return [prompt + tokens for prompt, (tokens, _) in zip(asked, answers, strict=True)]


LOCAL_VOCAB = json.loads((LOCAL / "config.json").read_text())["text_config"]["vocab_size"]


@pytest.fixture(scope="module")
def local_reference():
    return Reference(LOCAL)


def local_engine(model, **options) -> Engine:
    """With the tokenizer, so that it can be asked in words too."""
    return Engine(model, vocab=LOCAL_VOCAB, tokenizer=str(LOCAL), skip_tokenizer_init=False, **options)


def canary_faults(engine, tokenizer) -> list[str]:
    """The launcher's own judgement of the questions that it asks at a start."""
    from vllm import SamplingParams

    questions = questions_for_start(LOCAL / "canary.json")
    sampling = SamplingParams(temperature=0, max_tokens=200)
    outputs = engine.llm.generate([{"prompt_token_ids": p} for p in start_prompts(tokenizer)], sampling, use_tqdm=False)
    found = []
    for question, output in zip(questions, outputs, strict=True):
        text = output.outputs[0].text.rpartition("</think>")[2]
        if wrong := fault(question, Answer(text, output.outputs[0].finish_reason == "stop")):
            found.append(wrong)
    return found


# Damaged: these tests come before those of the module's engines, since an engine that ends takes others along


def shifted_window(unpack):
    return lambda trellis: ((unpack(trellis).long() << 1) & 0xFFFF).int()


def swapped_scales(decode):
    """suh where svh belongs and the other way round; of unequal sides each is repeated or cut to fit."""

    def fit(scale, length):
        return scale.repeat(-(-length // len(scale)))[:length]

    def damaged(tensors, dtype=torch.float32):
        suh, svh = fit(tensors.svh, len(tensors.suh)), fit(tensors.suh, len(tensors.svh))
        return decode(type(tensors)(tensors.trellis, suh, svh, tensors.codebook), dtype)

    return damaged


def skipped_block(transform):
    return lambda x: torch.cat([x[..., :HADAMARD_BLOCK], transform(x[..., HADAMARD_BLOCK:])], dim=-1)


BUGS = {
    "one ring bit off": ("unpack_states", shifted_window),
    "suh and svh swapped": ("decode_weight", swapped_scales),
    "one Hadamard block skipped": ("transform_blocks", skipped_block),
}


def plant(monkeypatch, bug: str) -> None:
    attribute, damage = BUGS[bug]
    damaged = damage(getattr(exl3_reference, attribute))
    monkeypatch.setattr(exl3_reference, attribute, damaged)
    if attribute == "decode_weight":
        monkeypatch.setattr("vllm_exl3.moe.decode_weight", damaged)


def judge_damaged(model, tokenizer, reference) -> None:
    """Both the canary and the comparison must fail."""
    asked = start_prompts(tokenizer)
    with in_process_vllm():
        engine = local_engine(model)
        assert canary_faults(engine, tokenizer)
        answers = engine.run(asked, tokens=4)
        del engine
    for conversation, (_, table) in zip(answered(asked, answers), answers, strict=True):
        with pytest.raises(AssertionError, match="mean KL"):
            compare_conversations(reference, [conversation], [table])


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_decode_bug_is_seen(monkeypatch, tokenizer, local_reference, bug):
    plant(monkeypatch, bug)  # the reference was decoded before
    judge_damaged(LOCAL, tokenizer, local_reference)


def transpose_blocks(trellis: torch.Tensor) -> torch.Tensor:
    """Each square of 128x128 weights, what a rank at TP=2 holds of a matrix here, with its tiles transposed."""
    side = HADAMARD_BLOCK // TILE
    squares = trellis.unflatten(0, (-1, side)).unflatten(2, (-1, side))
    return squares.transpose(1, 3).flatten(2, 3).flatten(0, 1).contiguous()


def test_a_transposed_square_trellis_is_seen(tmp_path, tokenizer, local_reference):
    """Headers cannot show it: every size is right."""
    for file in LOCAL.iterdir():
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            changed = {n: transpose_blocks(t) for n, t in tensors.items() if n.endswith("trellis")}
            assert changed and all(tensors[n].shape == t.shape for n, t in changed.items())
            save_file(tensors | changed, tmp_path / file.name, metadata={"format": "pt"})
        else:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    judge_damaged(tmp_path, tokenizer, local_reference)


# Whole


@pytest.fixture(scope="module", params=["as shipped", "everything EXL3"])
def local(request, all_exl3, local_reference):
    """An engine for all that is asked of one model, which is slow to start."""
    is_shipped = request.param == "as shipped"
    with in_process_vllm():
        engine = local_engine(LOCAL if is_shipped else all_exl3)
        engine.model = LOCAL if is_shipped else all_exl3
        engine.reference = local_reference if is_shipped else Reference(all_exl3)
        yield engine
        del engine.llm


@pytest.fixture(scope="module")
def start_answers(local, tokenizer):
    return local.run(start_prompts(tokenizer), tokens=24)


def test_the_local_model_equals_transformers(local, tokenizer):
    conversations = held_out_conversations(tokenizer)
    answers = local.run(conversations, tokens=1)
    compare_conversations(local.reference, conversations, [table[:-1] for _, table in answers])


def test_the_local_model_says_what_transformers_says(local, tokenizer, start_answers):
    conversations = answered(start_prompts(tokenizer), start_answers)
    compare_conversations(local.reference, conversations, [table for _, table in start_answers])


def test_the_canary_accepts_the_local_model(local, tokenizer):
    assert canary_faults(local, tokenizer) == []


# Several ranks


def assert_same_tokens(single, several, bar: float = 0.05) -> None:
    """Greedy tokens are equal up to the first near-tie, which is printed."""
    for (want, table), (got, _) in zip(single, several, strict=True):
        differ = [step for step, (a, b) in enumerate(zip(want, got, strict=True)) if a != b]
        if differ:
            row = table[len(table) - len(want) + differ[0]]
            margin = float(row[want[differ[0]]] - row[got[differ[0]]])
            print(f"near-tie at step {differ[0]}: {want[differ[0]]} and {got[differ[0]]}, {margin:.4f} apart")
            assert margin <= bar


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_two_ranks_answer_as_one(monkeypatch, local, tokenizer, start_answers, expert_parallel):
    """The ranks are processes of their own; the scheduler, and the engine of one rank, stay in this one."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    several = local_engine(local.model, enable_expert_parallel=expert_parallel, **options)
    try:
        assert_same_tokens(start_answers, several.run(start_prompts(tokenizer), tokens=24))
    finally:
        several.llm.llm_engine.engine_core.shutdown()


def test_the_comparison_of_ranks_rejects_other_tokens(start_answers):
    other = [([(token + 1) % LOCAL_VOCAB for token in tokens], table) for tokens, table in start_answers]
    with pytest.raises(AssertionError):
        assert_same_tokens(start_answers, other)
