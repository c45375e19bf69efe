import json
import struct

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from launcher.checkpoint import check_checkpoint
from launcher.errors import Exit, LauncherError

SHARD = "model-00001-of-00002.safetensors"


def test_whole_checkpoint_passes(checkpoint_folder):
    check_checkpoint(checkpoint_folder)


def remove(name):
    return lambda folder: (folder / name).unlink()


def cut(count):
    return lambda folder: (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-count])


def append(folder):
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes() + b"x")


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def index(**weight_map):
    return write("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


DAMAGE = {
    "no folder": (lambda folder: folder.rename(folder.with_name("gone")), "no such model folder"),
    "no config": (remove("config.json"), r"config\.json: the file is missing"),
    "no tokenizer": (remove("tokenizer.json"), r"tokenizer\.json: the file is missing"),
    "broken config": (write("config.json", "{"), r"config\.json: not readable as JSON"),
    "config is a list": (write("config.json", "[]"), r"config\.json: holds a list"),
    "another format": (write("config.json", '{"quantization_config": {"quant_method": "awq"}}'), "is 'awq'"),
    "no format": (write("config.json", "{}"), "is None"),
    "no index, no single file": (remove("model.safetensors.index.json"), "has neither"),
    "empty index": (index(), "no weight_map"),
    "index leads elsewhere": (index(a="../other.safetensors"), "no file name"),
    "shard missing": (remove(SHARD), SHARD + ": the index names this file and it is missing"),
    "shard cut by one": (cut(1), SHARD + r".*1 bytes are missing"),
    "shard cut in the header": (cut(40), SHARD + ".*header cannot be read"),
    "shard too long": (append, SHARD + ".*1 bytes too many"),
    "shard is a pointer": (
        write(SHARD, "version https://git-lfs.github.com/spec/v1\n"),
        SHARD + ".*header cannot be read",
    ),
    "shard empty": (write(SHARD, ""), SHARD + ".*header cannot be read"),
    "tensor missing": (index(a=SHARD, b=SHARD, z=SHARD), SHARD + ": lacks z"),
    "tensor extra": (index(a=SHARD), SHARD + ": also holds b"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_by_file(checkpoint_folder, name):
    damage, expected = DAMAGE[name]
    damage(checkpoint_folder)
    with pytest.raises(LauncherError, match=expected) as caught:
        check_checkpoint(checkpoint_folder)
    assert caught.value.code == Exit.REFUSED
    assert str(checkpoint_folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@given(header=st.binary(max_size=200), data=st.binary(max_size=40))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_header_is_read_or_refused(checkpoint_folder, header, data):
    (checkpoint_folder / SHARD).write_bytes(struct.pack("<Q", len(header)) + header + data)
    with pytest.raises(LauncherError, match=SHARD):
        check_checkpoint(checkpoint_folder)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=14), inner, max_size=3),
)


@given(json_values)
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_header_is_read_or_refused(checkpoint_folder, value):
    raw = json.dumps({"a": value, "b": {"data_offsets": value}}).encode()
    (checkpoint_folder / SHARD).write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(LauncherError, match=SHARD):
        check_checkpoint(checkpoint_folder)
