"""The training form of the model against transformers and against KDA's plain recurrence."""

import pytest
import torch
from vllm_exl3.format import Exl3FormatError

from tools.local_model import make_random, model
from tools.local_model.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from tools.local_model.evaluate import load_parameters
from tools.local_model.reference import load_reference, reference_greedy, reference_logits

pytest.importorskip("transformers")
IDS = torch.randint(0, 500, (75,), generator=torch.Generator().manual_seed(0)).tolist()
VARIANTS = {
    "experts-only": {},
    "all-exl3": {"all_exl3": True, "experts": "mul13"},
    "vision-namespace": {"namespace": "vl", "dense": "3inst5", "experts": "mul12.5"},
    "mixed-rates": {"all_exl3": True, "dense": {"layers.0.mlp.up_proj": "mcg3", "lm_head": "mul18"}},
    "native": {"experts": None},
}


@pytest.fixture
def random_model(tmp_path):
    def write(**options):
        make_random.write_random_model(tmp_path, vocab_size=512, **options)
        return tmp_path

    return write


def test_the_training_form_equals_transformers(random_model):
    path = random_model()
    parameters, text = load_parameters(path)
    ours = model.logits(parameters, torch.tensor([IDS]), text)[0]
    theirs = reference_logits(*load_reference(path), IDS)
    assert (ours - theirs).norm() / theirs.norm() < 1e-5
    parameters["layers.1.mlp.gate.e_score_correction_bias"][0] -= 1  # a planted bug must show
    assert (model.logits(parameters, torch.tensor([IDS]), text)[0] - theirs).norm() / theirs.norm() > 1e-2


@pytest.mark.parametrize("decay_scale", [0.01, 1.0, 5.0])
def test_the_chunked_delta_rule_equals_the_recurrence(decay_scale):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 41, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    decay = -decay_scale * torch.rand(1, 2, 41, 8, generator=generator, dtype=torch.float64)
    beta = torch.rand(1, 2, 41, generator=generator, dtype=torch.float64)
    state = torch.zeros(1, 2, 8, 8, dtype=torch.float64)
    expected = []
    for t in range(41):
        state = state * decay[:, :, t].exp().unsqueeze(-1)
        error = v[:, :, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, :, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, :, t], beta[:, :, t, None] * error)
        expected.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    torch.testing.assert_close(model.delta_rule(q, k, v, decay, beta), torch.stack(expected, 2))


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_every_random_variant_loads_and_depends_on_its_context(random_model, options):
    loaded = load_reference(random_model(**options))
    whole = reference_logits(*loaded, IDS)[-1].log_softmax(-1)
    recent = reference_logits(*loaded, IDS[-16:])[-1].log_softmax(-1)
    assert (whole.exp() >= 0.01).sum() >= 2
    assert (whole.exp() * (whole - recent)).sum() > 1e-3
    greedy = reference_greedy(*loaded, IDS, max_tokens=4)
    again = reference_logits(*loaded, IDS + greedy)[len(IDS) - 1 : -1].argmax(-1).tolist()
    assert greedy == again


def test_a_seed_gives_the_same_files(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        make_random.write_random_model(tmp_path / name, seed=seed, vocab_size=512)
    shards = [(tmp_path / name / "model-00001-of-00002.safetensors").read_bytes() for name in "abc"]
    assert shards[0] == shards[1] != shards[2]


def damage(path, change):
    config, tensors = read_checkpoint(path)
    change(tensors)
    write_checkpoint(path, config, tensors)


def test_a_wrong_marker_is_refused_by_name(random_model):
    name = "model.layers.1.mlp.experts.2.up_proj.mcg"
    path = random_model()
    damage(path, lambda tensors: tensors.update({name: tensors[name] + 1}))
    with pytest.raises(Exl3FormatError, match=name.replace(".", r"\.")):
        load_reference(path)


def test_a_missing_tensor_is_refused_by_name(random_model):
    path = random_model()
    damage(path, lambda tensors: tensors.pop("model.layers.0.hc_attn_fn"))
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn_hc\.fn"):
        load_reference(path)


def test_a_tensor_that_is_stored_twice_is_refused(random_model):
    path = random_model()
    extra = {"model.layers.1.mlp.experts.0.up_proj.weight": torch.zeros(256, 128)}
    damage(path, lambda tensors: tensors.update(extra))
    with pytest.raises(Exl3FormatError, match=r"experts\.0\.up_proj\.weight"):
        load_reference(path)


@pytest.mark.parametrize("rate", ["mcg", "mcg9", "mcg2.5", "fp4"])
def test_unknown_rates_are_refused(rate):
    with pytest.raises(ValueError, match="expected a codebook"):
        make_random.parse_rate(rate)


def test_a_matrix_that_cannot_be_exl3_is_refused_by_name(random_model):
    with pytest.raises(ValueError, match=r"layers\.3\.self_attn\.q_a_proj: 64x128"):
        random_model(dense="mcg4", q_lora_rank=64)
