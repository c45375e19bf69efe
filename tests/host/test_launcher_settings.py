import pytest

from launcher import settings
from launcher.errors import Exit, LauncherError


def test_defaults_are_the_documented_ones():
    values = settings.resolve({}, {})
    assert values["port"] == 8888
    assert values["model"] == settings.REPOSITORY / "models/local"
    assert values["canary"] == settings.REPOSITORY / "models/local/canary.json"
    assert values["api_key"] == ""


def test_canary_follows_the_model(tmp_path):
    assert settings.resolve({"model": tmp_path}, {})["canary"] == tmp_path / "canary.json"
    assert settings.resolve({"model": tmp_path, "canary": tmp_path / "q.json"}, {})["canary"] == tmp_path / "q.json"


@pytest.mark.parametrize("flags", [{"port": 0}, {"port": 65536}, {"max_model_len": 2049}, {"tensor_parallel_size": 0}])
def test_values_out_of_range_are_refused_by_flag(flags):
    (name,) = flags
    with pytest.raises(LauncherError, match="--" + name.replace("_", "-")) as caught:
        settings.resolve(flags, {})
    assert caught.value.code == Exit.USAGE


def test_only_secrets_come_from_the_environment():
    values = settings.resolve({}, {"VLLM_API_KEY": "k", "PORT": "1", "MODEL": "x", "VLLM_PORT": "2"})
    assert values == settings.resolve({}, {}) | {"api_key": "k"}


def test_every_row_says_what_it_is_for():
    assert all(row.doc.endswith(".") and len(row.doc) > 20 for row in settings.TABLE)
    assert len({row.name for row in settings.TABLE}) == len(settings.TABLE)
