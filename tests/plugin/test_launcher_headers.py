"""The launcher's header pass refuses what the plugin would refuse at load, and passes what it would load."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.append(str(Path(__file__).resolve().parents[1] / "host"))

from header_damage import DAMAGE, LOCAL, copy_local
from vllm_exl3.checkpoint import check_claims, read_layout
from vllm_exl3.format import Exl3FormatError

from launcher.errors import LauncherError
from launcher.weights import contents


def plugin_reads(folder):
    check_claims(read_layout(folder), json.loads((folder / "config.json").read_text())["quantization_config"])


@pytest.mark.parametrize("name", DAMAGE)
def test_both_refuse(tmp_path, name):
    folder = copy_local(tmp_path / "model")
    DAMAGE[name][0](folder)
    with pytest.raises(Exl3FormatError):
        plugin_reads(folder)
    with pytest.raises(LauncherError):
        contents.read(folder)


def test_both_pass_and_agree():
    plugin_reads(LOCAL)
    layout, found = read_layout(LOCAL), contents.read(LOCAL)
    assert sum(found.rates.values()) == len(layout.exl3)
