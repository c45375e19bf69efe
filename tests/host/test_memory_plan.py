"""Memory is solved before anything is loaded: by terms that have names."""

import pytest
from cluster_settings import settings
from header_damage import DAMAGE, LOCAL, copy_local
from recorded import CONTENTS, GIB, context
from test_preflight import only, probe_change

from launcher import cluster_plan, memory_plan
from launcher.errors import LauncherError
from launcher.findings import CHECKS, FAIL, PASS


def findings(contents=CONTENTS, change=None, name="good_tp2", **changes):
    return CHECKS["memory-plan"](context(name, change, contents=contents, **changes))


def draft_of(gib):
    """Both nodes have a draft of that size."""

    def change(records):
        for record in records:
            sizes = {"model.safetensors": gib * GIB}
            record["probe"]["paths"]["draft"]["checkpoint"] |= {"sizes": sizes, "record": None}

    return change


def test_the_terms_add_up_and_are_named():
    seen = only(findings(CONTENTS, draft_of(2)), 1, PASS).seen
    assert seen.startswith(
        "weights 81.0 + draft model 2.0 + KV cache 11.0 + activations and graphs 4.0 + left free 2.0 = 100.0 GiB of "
    )


@pytest.mark.parametrize("changes, weights", [
    ({}, 81), ({"VISION": 0}, 80), ({"SPEC_METHOD": "mtp"}, 83), ({"EXPERT_PARALLEL": 1}, 81),
])  # fmt: skip
def test_what_is_loaded_counts(changes, weights):
    assert f"weights {weights}.0" in only(findings(CONTENTS, **changes), 0, PASS).seen


def test_more_than_there_is_is_refused_with_what_fits():
    only(findings(CONTENTS, probe_change(1, "memory", available_bytes=98 * GIB), SPEC_METHOD="none"), 1, PASS)
    finding = only(findings(CONTENTS, probe_change(1, "memory", available_bytes=94 * GIB), SPEC_METHOD="none"), 1, FAIL)
    assert finding.seen.endswith("= 98.0 GiB of 94.0 GiB: 4.0 GiB too much")
    assert finding.fix.startswith("KV_CACHE_GIB=7 fits")
    finding = only(findings(CONTENTS, probe_change(1, "memory", available_bytes=60 * GIB), SPEC_METHOD="none"), 1, FAIL)
    assert "more nodes" in finding.fix


def test_headers_that_cannot_be_read_fail():
    finding = only(findings(LauncherError("x.safetensors: is no whole file")), 0, FAIL)
    assert "x.safetensors" in finding.seen and "./download.sh" in finding.fix
    assert "not computed" in only(findings(None), 0, PASS).seen


def test_contents_are_those_of_model_dir(tmp_path):
    assert memory_plan.contents_of(settings("tp2", MODEL_DIR=str(tmp_path / "none"))) is None
    assert memory_plan.contents_of(settings("tp2", MODEL_DIR=str(LOCAL))).layers == (1, 2, 3)
    folder = copy_local(tmp_path / "model")
    DAMAGE["no suh"][0](folder)
    assert isinstance(memory_plan.contents_of(settings("tp2", MODEL_DIR=str(folder))), LauncherError)


def test_the_plan_says_what_the_checkpoint_is_and_takes():
    config = settings("tp2", MODEL_DIR=str(LOCAL))
    text = cluster_plan.describe(cluster_plan.make(config, more_notes=memory_plan.notes(config)))
    assert "# Note: the checkpoint: 72 EXL3 matrices at 4 bits (mcg), experts of layers 1-3, 0 beside them" in text
    assert "its weights take 3.5 MiB on the fullest node, by the headers." in text
