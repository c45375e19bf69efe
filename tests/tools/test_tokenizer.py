"""The shipped tokenizer and chat template: round trips, ids, and what vLLM's glm47 parsers expect."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.local_model import corpus, shapes
from tools.local_model.tokenizer import train_tokenizer
from tools.local_model.torchvision_ops import declare_missing_operators

declare_missing_operators()
transformers = pytest.importorskip("transformers")

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer(local_model):
    return transformers.PreTrainedTokenizerFast.from_pretrained(local_model)


def test_the_corpus_yields_the_shipped_tokenizer(local_model):
    trained = json.loads(train_tokenizer(corpus.tokenizer_texts(seed=0)).to_str())
    assert trained == json.loads((local_model / "tokenizer.json").read_text())


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_special_tokens_have_the_ids_of_the_config(tokenizer, local_model):
    config = json.loads((local_model / "config.json").read_text())
    vocab_size = config["text_config"]["vocab_size"]
    assert len(tokenizer) == vocab_size
    for token in shapes.SPECIAL_TOKENS:
        assert tokenizer.convert_tokens_to_ids(token) == shapes.special_token_id(vocab_size, token)
    assert config["image_token_id"] == tokenizer.convert_tokens_to_ids("<|image|>")
    stops = [tokenizer.convert_ids_to_tokens(i) for i in config["eos_token_id"]]
    assert stops == ["<|endoftext|>", "<|user|>", "<|observation|>"]


def test_digits_are_single_tokens(tokenizer):
    assert tokenizer.tokenize("17, 18") == ["1", "7", ",Ġ", "1", "8"]


def test_tags_that_parsers_read_are_not_skipped(tokenizer):
    ids = tokenizer.encode("<think></think><tool_call>f</tool_call><|user|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think></think><tool_call>f</tool_call>"


def test_the_template_renders_in_transformers_as_in_training(tokenizer, local_model):
    samples = corpus.held_out_samples()[::17]
    assert len(samples) > 50
    for sample in samples:
        rendered = tokenizer.apply_chat_template(
            sample.messages, tools=sample.tools or None, tokenize=False, reasoning_effort=sample.effort
        )
        assert corpus.render(sample).startswith(rendered)


def test_the_prompt_opens_thinking_and_names_effort_and_tools(tokenizer):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Weather in Rome?"}]}]
    prompt = tokenizer.apply_chat_template(
        messages, tools=[TOOL], tokenize=False, add_generation_prompt=True, reasoning_effort="medium"
    )
    assert prompt == (
        "[gMASK]<sop><|system|>Reasoning Effort: high\n# Tools\n- get_weather(city): Get the weather"
        "<|user|>Weather in Rome?<|assistant|><think>"
    )


def test_earlier_thoughts_are_dropped_and_those_of_this_turn_kept(tokenizer):
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "reasoning_content": "old"},
        {"role": "user", "content": "z"},
        {"role": "assistant", "content": "", "reasoning_content": "new", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "old" not in text
    assert text.endswith(
        "<think>new</think><tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
        "<|observation|><tool_response>r</tool_response>"
    )


def test_vllm_recognises_the_template_as_always_thinking(tokenizer):
    glm47 = pytest.importorskip("vllm.parser.glm47_moe")
    assert glm47._glm53_always_thinks(tokenizer)


def test_vllm_reads_arguments_from_the_template_s_calls(tokenizer):
    glm47 = pytest.importorskip("vllm.parser.glm47_moe")
    call = {"function": {"name": "book", "arguments": {"from": "Rome", "to": "New York"}}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    raw = text.split("<tool_call>book")[1].split("</tool_call>")[0]
    assert json.loads(glm47._glm47_arg_converter(raw, partial=False)) == {"from": "Rome", "to": "New York"}
