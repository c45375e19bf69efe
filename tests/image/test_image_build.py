"""The Dockerfile, built for real on a small base: what comes out, and that each fault stops the build by name."""

import json

import pytest
from small_base import REPOSITORY, SITE

from launcher import recipe

pytestmark = pytest.mark.image

ARGUMENTS = ("--build-arg", "OFFLINE=1", "--build-arg", "EXLLAMAV3=skip")


def argument(name: str, value: str) -> tuple[str, str]:
    return "--build-arg", f"{name}={value}"


@pytest.fixture
def build(buildah, base, context):
    """Builds a context; returns exit status and output."""

    def run(folder, *words, image=base):
        return buildah.build(folder, *ARGUMENTS, *argument("BASE", image), *words)

    return run


def test_an_image_is_built_and_says_what_it_is(buildah, base, build, context):
    digest, folder = "sha256:" + "ab" * 32, context()
    done = build(folder, *argument("RECIPE", recipe.digest(REPOSITORY)), *argument("BASE_DIGEST", digest), "-t", "ours")
    assert done.returncode == 0, done.stdout[-4000:]
    for said in (
        f"recipe: {recipe.digest(REPOSITORY)}",
        f"base: {base}, digest {digest}; its packages are unchanged",
        "packages that the base lacks: msgpack",
        "exllamav3: skipped by the build argument EXLLAMAV3=skip",
        "override: vllm.models.glm5next.common.kda:Glm5NextLinearAttention",
        "architectures: 12.1a",
        # of the base, and no fault of ours
        "pip check already says: vllm 0.33.0 requires",
    ):
        assert said in done.stdout, said
    found = buildah.inspect("ours")
    labels = found["OCIv1"]["config"]["Labels"]
    assert labels["exl3.recipe"] == recipe.digest(REPOSITORY)
    assert labels["org.opencontainers.image.base.name"] == base
    assert labels["org.opencontainers.image.base.digest"] == digest
    assert (labels["exl3.vllm"], labels["exl3.exllamav3"], labels["exl3.ray"]) == ("0.33.0", "skip", "2.60.0")
    layers = len(found["OCIv1"]["rootfs"]["diff_ids"]) - len(buildah.inspect(base)["OCIv1"]["rootfs"]["diff_ids"])
    assert layers <= 3
    written = json.loads(buildah.read("ours", "/usr/local/share/exl3/image.json"))
    assert (written["base_digest"], written["exllamav3"]) == (digest, "skipped")
    assert {name.split("-")[0] for name in written["wheels"]} == {"msgpack", "vllm_exl3"}
    source = (REPOSITORY / "launcher/fabric_bind.c").read_text()
    assert buildah.read("ours", "/usr/local/lib/exl3/fabric_bind.c") == source


def test_the_wheels_of_a_build_are_kept_for_one_without_a_network(build, context, tmp_path):
    folder = context()
    done = build(folder, "--target", "wheels", "--output", f"type=local,dest={tmp_path / 'kept'}")
    assert done.returncode == 0, done.stdout[-4000:]
    kept, brought = ({one.name for one in place.iterdir()} for place in (tmp_path / "kept", folder / "image/wheels"))
    assert kept == brought


# What stops a build. Each fault is in what is built from; the sentence names it.


def refused(done, *words: str) -> None:
    assert done.returncode != 0
    for word in words:
        assert word in done.stdout, done.stdout[-3000:]


def edit(path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_another_vllm_is_refused(buildah, build, context, tmp_path):
    moved = f"mv /{SITE}/vllm-0.33.0.dist-info /{SITE}/vllm-0.34.0.dist-info"
    edited = f"sed -i 's/^Version: .*/Version: 0.34.0/' /{SITE}/vllm-0.34.0.dist-info/METADATA"
    other = buildah.variant("other-vllm", tmp_path, f"RUN {moved} && {edited}")
    refused(build(context(), image=other), "base image: vllm is 0.34.0, needed is 0.33.0: the plugin's overrides")


def test_a_base_without_a_compiler_is_refused(buildah, build, context, tmp_path):
    other = buildah.variant("no-compiler", tmp_path, "RUN rm /usr/bin/cc")
    refused(build(context(), image=other), "base image: has no C compiler (cc, gcc or clang)")


def test_other_files_than_asked_for_are_refused(build, context):
    refused(build(context(), *argument("RECIPE", "0" * 64)), "recipe: the build was asked for 0000")


def test_a_plugin_wheel_of_other_sources_is_refused_offline(build, context):
    refused(build(context(tag="0old")), "vllm_exl3: OFFLINE=1 needs its wheel with the build tag",
            "was made from other sources")  # fmt: skip


def test_a_missing_locked_wheel_is_refused_offline(build, context):
    folder = context()
    next((folder / "image/wheels").glob("msgpack-*")).unlink()
    refused(build(folder), "msgpack with the hashes of requirements/image.txt: pip could not get it")


def test_a_locked_wheel_with_other_bytes_is_refused(build, context):
    folder = context()
    wheel = next((folder / "image/wheels").glob("msgpack-*"))
    wheel.write_bytes(wheel.read_bytes() + b"x")
    refused(build(folder), "HASHES", "pip could not get it")


def test_a_change_of_the_base_s_files_is_refused(build, context):
    """By a wheel that writes into other packages, and by a step that somebody adds."""
    folder = context(more={"torch/version.py": b"cuda = '12.8'\n", "vllm/extra.py": b""})
    edit(folder / "Dockerfile", "LABEL ", f"RUN echo '# patched' >> /{SITE}/vllm/__init__.py\nLABEL ")
    changes = ("torch: torch/version.py of the base was changed", "vllm: vllm/extra.py of the base was added")
    refused(build(folder), *changes, "vllm: vllm/__init__.py of the base was changed")


def test_another_transformers_is_refused(build, context):
    folder, info = context(), "transformers-5.0.0.dist-info"
    make = (
        "import zipfile; z = zipfile.ZipFile('/out/wheels/transformers-5.0.0-py3-none-any.whl', 'w'); "
        f"z.writestr('{info}/METADATA', 'Metadata-Version: 2.1\\nName: transformers\\nVersion: 5.0.0\\n'); "
        f"z.writestr('{info}/WHEEL', 'Wheel-Version: 1.0\\nTag: py3-none-any\\n'); z.writestr('{info}/RECORD', '')"
    )
    edit(folder / "Dockerfile", "\nFROM scratch AS wheels", f'\nRUN python3 -c "{make}"\n\nFROM scratch AS wheels')
    refused(build(folder), "transformers", "install: pip refused a wheel")


def test_missing_kernels_are_refused(build, context):
    refused(build(context(kernels=False)), "selfcheck: ", "_kernels.so: is not there")


def test_kernels_for_another_gpu_are_refused(build, context):
    refused(build(context(architecture=90)), "has no code for 12.1a, only for 9.0a")
