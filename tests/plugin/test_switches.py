"""The settings of the CUDA path, and which kernel they give which rows."""

import pytest
from vllm_exl3.checkpoint import Exl3LoadError
from vllm_exl3.format import Codebook
from vllm_exl3.gpu_experts import Many, Plan, make_plan
from vllm_exl3.switches import Few, SwitchError, Switches, parse

SPARK, HOPPER = 12, 9


def test_defaults():
    assert parse({}) == parse({"EXL3_FAT_GROUPED": "", "EXL3_FAT_CROSSOVER": " "}) == Switches(True, None)
    assert Switches().few(SPARK) == Few(32, 512)
    assert Switches().few(HOPPER) == Few(2, 0)


@pytest.mark.parametrize("text, rows", [("0", 0), ("1", 1), ("128", 128), (" 16 ", 16)])
def test_crossover_overrules_the_device(text, rows):
    for device in (SPARK, HOPPER):
        assert parse({"EXL3_FAT_CROSSOVER": text}).few(device) == Few(rows, 16 * rows)


@pytest.mark.parametrize("text", ["129", "-1", "3.5", "many", "٣"])
def test_crossover_out_of_range_is_refused(text):
    with pytest.raises(SwitchError, match=r"EXL3_FAT_CROSSOVER: is .*, expected rows per expert, 0 to 128"):
        parse({"EXL3_FAT_CROSSOVER": text})


def test_grouped_takes_two_values():
    assert not parse({"EXL3_FAT_GROUPED": "0"}).fat_grouped
    with pytest.raises(SwitchError, match=r"EXL3_FAT_GROUPED: is 'true', expected 1 .* or 0"):
        parse({"EXL3_FAT_GROUPED": "true"})


def plan(bits=(4, 4), codebooks=(Codebook.MCG,), **switches) -> Plan:
    return make_plan(bits, set(codebooks), Switches(**switches), SPARK)


def test_plan_splits_between_both_kernels():
    assert plan() == Plan(Few(32, 512), Many.GROUPED)
    assert plan(fat_grouped=False) == Plan(Few(32, 512), Many.DECODED)
    assert str(plan()) == (
        "exllamav3's kernels up to 32 tokens (of an expert in steps of up to 512), above grouped kernel"
    )


@pytest.mark.parametrize("bits, codebook", [(4, Codebook.THREE_INST), (2.5, Codebook.MUL1)])
def test_what_the_fused_kernel_lacks_is_all_for_the_grouped_one(bits, codebook):
    assert plan((bits, bits), [codebook]) == Plan(Few(0, 0), Many.GROUPED)


def test_crossover_of_zero_leaves_nothing_to_exllamav3():
    assert plan(fat_crossover=0) == Plan(Few(0, 0), Many.GROUPED)


def test_two_rates_in_a_layer_are_refused_with_a_way_out():
    with pytest.raises(Exl3LoadError, match=r"gate and up have 4 bits and down 5, .* EXL3_FAT_GROUPED=0"):
        plan((4, 5))
    assert plan((4, 5), fat_grouped=False) == Plan(Few(0, 0), Many.DECODED)


def test_two_codebooks_in_a_layer_are_refused():
    with pytest.raises(Exl3LoadError, match="codebooks mcg and mul1"):
        plan(codebooks=[Codebook.MCG, Codebook.MUL1])
