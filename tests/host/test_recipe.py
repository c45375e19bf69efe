"""The digest of what goes into an image: it changes with that, and with nothing else."""

import shutil
import subprocess
import sys

import pytest

from launcher import recipe
from launcher.settings import REPOSITORY


@pytest.fixture
def checkout(tmp_path):
    for name in recipe.files(REPOSITORY):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


def test_it_has_what_an_image_is_made_of_and_no_more():
    names = recipe.files(REPOSITORY)
    for name in ("Dockerfile", "overlay/vllm_exl3/selfcheck.py", "overlay/csrc/rows.cu", "image/wheels.py",
                 "requirements/image.txt", "launcher/fabric_bind.c", "tools/gpu/exllamav3_ext/build.py"):  # fmt: skip
        assert name in names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "models/", ".env"))]
    assert not [name for name in names if "__pycache__" in name or name.endswith((".so", ".whl"))]


def test_it_is_the_same_in_another_folder(checkout):
    assert recipe.digest(checkout) == recipe.digest(REPOSITORY)


@pytest.mark.parametrize("name", ["Dockerfile", "overlay/csrc/rows.cu", "image/base.py", "requirements/image.txt"])
def test_it_changes_with_what_goes_in(checkout, name):
    before = recipe.digest(checkout)
    with (checkout / name).open("a") as file:
        file.write("\n")
    assert recipe.digest(checkout) != before


@pytest.mark.parametrize("name", ["docs/image.md", "tests/x.py", "image/wheels/x.whl", "overlay/build/x.o",
                                  "overlay/vllm_exl3/_kernels.so", "overlay/vllm_exl3/__pycache__/x.pyc",
                                  "overlay/vllm_exl3.egg-info/PKG-INFO"])  # fmt: skip
def test_it_does_not_change_with_what_stays_out(checkout, name):
    before = recipe.digest(checkout)
    (checkout / name).parent.mkdir(parents=True, exist_ok=True)
    (checkout / name).write_text("x")
    assert recipe.digest(checkout) == before


def test_a_renamed_file_is_another_recipe(checkout):
    before = recipe.digest(checkout)
    (checkout / "overlay/csrc/rows.cu").rename(checkout / "overlay/csrc/lines.cu")
    assert recipe.digest(checkout) != before


def test_a_build_of_other_files_than_asked_for_stops(checkout):
    command = [sys.executable, checkout / "launcher/recipe.py", "--expect"]
    done = subprocess.run([*command, recipe.digest(checkout)], capture_output=True, text=True)
    assert done.returncode == 0 and recipe.digest(checkout) in done.stdout
    done = subprocess.run([*command, "0" * 64], capture_output=True, text=True)
    assert done.returncode == 1 and "the build was asked for 0000" in done.stderr
