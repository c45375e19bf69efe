"""How containers get the GPU: what each refusal of Docker means, and that every container takes its node's way."""

import json

import pytest
from docker_refusals import CDI_MODE, REFUSALS
from stub_cluster import an_image

from launcher import cluster_life, cluster_soak, gpu_ways
from launcher.commands import REPOSITORY
from launcher.errors import Exit, LauncherError
from launcher.gpu_ways import WAYS

MEANINGS = {
    "toolkit in CDI mode": ("in CDI mode", "nvidia-ctk config --set nvidia-container-runtime.mode=auto"),
    "no toolkit": ("started without NVIDIA's toolkit", "apt-get install nvidia-container-toolkit"),
    "no toolkit, Docker 29": ("finds no CDI description", "nvidia-ctk cdi generate"),
    "hook removed": ("the hook of NVIDIA's toolkit is gone", "apt-get install nvidia-container-toolkit"),
    "driver updated": ("the old one is still loaded", "reboot"),
    "driver not loaded": ("NVIDIA's driver is not loaded", "nvidia-smi works"),
    "no CDI description": ("has nvidia.com/gpu=all", "nvidia-ctk cdi generate"),
    "CDI off": ("Docker's CDI is off", '"cdi": true'),
    "Docker without CDI": ("knows no CDI", "update Docker"),
    "no runtime": ("no runtime of the name nvidia", "nvidia-ctk runtime configure"),
    "no runtime, older Docker": ("no runtime of the name nvidia", "nvidia-ctk runtime configure"),
    "runtime without a description": ("has nvidia.com/gpu=all", "nvidia-ctk cdi generate"),
    "container without the GPU's programs": ("without the GPU's programs", "nvidia-container-toolkit"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_every_refusal_has_its_sentence(name):
    meaning, fix = gpu_ways.meaning_of(REFUSALS[name][1])
    assert MEANINGS[name][0] in meaning and MEANINGS[name][1] in fix


def test_an_unknown_refusal_is_told_as_it_is():
    seen, fix = gpu_ways.refused({"gpus": "docker: something new", "cdi": ""})
    assert "`--gpus all`: docker: something new" in seen and "no word why" in seen
    assert "docker run --rm --device nvidia.com/gpu=all IMAGE nvidia-smi -L" in fix


def test_flags_of_the_gpu_are_written_in_one_place():
    flags = ('"--gpus"', '"nvidia.com/gpu=all"', '"--runtime"')
    files = {path.name: path.read_text() for path in (REPOSITORY / "launcher").rglob("*.py")}
    holders = {name for name, text in files.items() if any(flag in text for flag in flags)}
    assert holders == {"gpu_ways.py"}


# Containers


def ways_of(calls) -> list[str | None]:
    """Of `docker run`: which way each took to the GPU."""
    return [next((way for way, words in WAYS.items() if " ".join(words) in " ".join(call)), None) for call in calls]


def test_every_rank_takes_the_way_that_works_on_its_node(cluster_stub, monkeypatch):
    cluster_stub.daemon("head", gpus=CDI_MODE)
    cluster_stub.daemon("worker", gpus=REFUSALS["no toolkit"][1], cdi=REFUSALS["CDI off"][1])
    assert cluster_life.start(cluster_stub.config()) == Exit.OK
    runs = cluster_stub.calls("run")
    assert dict(zip([call[0] for call in runs], ways_of(runs), strict=True)) == {"head": "cdi", "worker": "runtime"}
    tried = cluster_stub.calls("try")
    assert sorted(zip([call[0] for call in tried], ways_of(tried), strict=True)) == [
        ("head", "cdi"), ("head", "gpus"), ("worker", "cdi"), ("worker", "gpus"), ("worker", "runtime")
    ]  # fmt: skip
    assert all("--rm" in call and "never" in call for call in tried)


def test_a_node_without_a_way_starts_nothing(cluster_stub):
    cluster_stub.daemon("worker", **dict(REFUSALS[name] for name in ("no toolkit", "CDI off", "no runtime")))
    with pytest.raises(LauncherError, match=r"node 1 \(10\.0\.0\.2\): no container gets the GPU .*nvidia-ctk"):
        cluster_life.start(cluster_stub.config())
    assert cluster_stub.calls("run") == []
    with pytest.raises(LauncherError, match="gpu-runtime failed"):
        skipped = ",".join(name for name in cluster_stub.config()["SKIP_CHECKS"] if name != "gpu-runtime")
        cluster_life.start(cluster_stub.config(SKIP_CHECKS=skipped))


def test_compiling_caches_takes_the_nodes_way(cluster_stub):
    from launcher import caches

    for node in ("head", "worker"):
        cluster_stub.images(node, ours=an_image("a", "l1", "ours"))
    cluster_stub.daemon("head", gpus=CDI_MODE)
    assert caches.warm(cluster_stub.config()) == Exit.OK
    compiled = [call for call in cluster_stub.calls("run") if "vllm_exl3.warm_up" in call]
    assert ways_of(compiled) == ["cdi"]


def test_the_soaks_container_takes_the_nodes_way(cluster_stub):
    cluster_stub.daemon("head", gpus=CDI_MODE)
    assert cluster_soak.way_here(cluster_stub.config()) == "cdi"
    place = cluster_soak.Place(cluster_stub.config(), 0, cluster_soak.Found("/h", "sha256:" + "a" * 64, gpu_way="cdi"))
    assert " ".join(WAYS["cdi"]) in json.dumps(list(cluster_soak.gpu_words(place))).replace('", "', " ")
