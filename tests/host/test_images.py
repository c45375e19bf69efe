"""The image on two pretended nodes: built, fetched, chosen, copied and told, and what is left when it fails."""

import json

import pytest
from stub_cluster import BASE, IMAGE, an_image

from launcher import cluster, cluster_life, images, preflight, recipe
from launcher.errors import Exit, LauncherError

PREVIOUS = f"{IMAGE}-previous"
OLD, NEW = an_image("a", "l1", "old"), an_image("c", "l1", "new", recipe="r" * 64)


def ids(stub, node: str) -> dict[str, str]:
    """Name -> first letter of the id."""
    found = stub.images_of(node)
    return {name: found[name]["Id"].removeprefix("sha256:")[0] for name in (IMAGE, PREVIOUS) if name in found}


# Commands


def test_build_command_says_base_digest_and_recipe():
    command = images.build_command(images.Options(), BASE, "sha256:ab", "r" * 64, "arm64", "/tmp/id")
    assert command[:5] == ["docker", "build", "--platform", "linux/arm64", "--iidfile"]
    assert {f"BASE={BASE}", "BASE_DIGEST=sha256:ab", f"RECIPE={'r' * 64}"} <= set(command)
    assert not {"OFFLINE=1", "EXLLAMAV3=skip", "--network"} & set(command)


def test_build_command_of_an_offline_build_has_no_network():
    options = images.Options(offline=True, skip_exllamav3=True, jobs=4)
    command = images.build_command(options, BASE, "", "", "arm64", "/tmp/id")
    assert {"OFFLINE=1", "EXLLAMAV3=skip", "JOBS=4"} <= set(command)
    assert command[command.index("--network") + 1] == "none"


def test_the_default_base_is_the_dockerfile_s():
    assert images.default_base((images.REPOSITORY / "Dockerfile").read_text()) == BASE


@pytest.mark.parametrize("version, one", [("28.0.1", True), ("29", True), ("27.5.1", False), ("", False)])
def test_one_platform_is_saved_where_docker_can(version, one):
    assert ("--platform" in images.save_command("name", "arm64", version)) is one


# build, pull, use


def test_build_ends_with_the_same_image_everywhere_and_keeps_the_previous(cluster_stub, capfd):
    cluster_stub.images("head", ours=OLD, base=an_image("d", "l1", digest=f"vllm/vllm-openai@sha256:{'d' * 64}"))
    cluster_stub.images("worker", ours=OLD)
    assert images.build(cluster_stub.config(), images.Options()) == Exit.OK
    for node in ("head", "worker"):
        found = ids(cluster_stub, node)
        assert (found[IMAGE], found[PREVIOUS]) == ("b", "a")
    (call,) = cluster_stub.calls("build")
    assert f"BASE_DIGEST=sha256:{'d' * 64}" in call and f"RECIPE={recipe.digest()}" in call
    (save,) = cluster_stub.calls("save")
    assert save[1:4] == ["save", "--platform", f"linux/{OLD['Architecture']}"]
    assert "restart` runs it" in capfd.readouterr().err


def test_a_base_that_is_not_here_is_pulled(cluster_stub):
    cluster_stub.images("head")
    cluster_stub.images("worker")
    (cluster_stub.books / "registry").write_text(json.dumps({BASE: an_image("d", "l1")}))
    assert images.build(cluster_stub.config(), images.Options()) == Exit.OK
    assert ids(cluster_stub, "worker") == {IMAGE: "b"}


@pytest.mark.parametrize("offline, words", [(False, "could not be pulled"), (True, "--offline fetches nothing")])
def test_a_base_that_cannot_be_had_is_named(cluster_stub, offline, words):
    cluster_stub.images("head", ours=OLD)
    with pytest.raises(LauncherError, match=f"the base {BASE} is not on this machine.*{words}"):
        images.build(cluster_stub.config(), images.Options(offline=offline))
    assert cluster_stub.calls("build") == [] and len(cluster_stub.calls("pull")) == (not offline)


def test_a_failed_build_replaces_nothing(cluster_stub):
    cluster_stub.images("head", ours=OLD, base=an_image("d", "l1"))
    cluster_stub.fail("build --platform")
    with pytest.raises(LauncherError, match=r"the build ended with 1.*Nothing was replaced"):
        images.build(cluster_stub.config(), images.Options())
    assert ids(cluster_stub, "head")[IMAGE] == "a" and PREVIOUS not in ids(cluster_stub, "head")


def test_use_goes_back_to_the_previous_and_forth_and_sends_nothing(cluster_stub):
    for node in ("head", "worker"):
        cluster_stub.images(node, ours=NEW, previous=OLD)
    for now, before in (("a", "c"), ("c", "a")):
        assert images.use(cluster_stub.config(), PREVIOUS) == Exit.OK
        for node in ("head", "worker"):
            assert ids(cluster_stub, node) == {IMAGE: now, PREVIOUS: before}
    assert cluster_stub.calls("save") == []


def test_use_of_what_is_not_here_is_refused(cluster_stub):
    cluster_stub.images("head", ours=OLD)
    with pytest.raises(LauncherError, match="other:tag is not on this machine; `docker images`"):
        images.use(cluster_stub.config(), "other:tag")


def test_pull_fetches_and_copies(cluster_stub):
    for node in ("head", "worker"):
        cluster_stub.images(node, ours=OLD)
    (cluster_stub.books / "registry").write_text(json.dumps({"registry/x:1": NEW}))
    assert images.pull(cluster_stub.config(), "registry/x:1") == Exit.OK
    assert ids(cluster_stub, "worker")[IMAGE] == "c"
    with pytest.raises(LauncherError, match="registry/y:1 could not be pulled"):
        images.pull(cluster_stub.config(), "registry/y:1")


def test_a_digest_is_given_to_no_other_image(cluster_stub):
    config = cluster_stub.config(IMAGE=f"name@sha256:{'a' * 64}")
    for function in (lambda: images.build(config, images.Options()), lambda: images.copy(config)):
        with pytest.raises(LauncherError, match="is a digest"):
            function()


# Copying


def test_copy_sends_only_where_the_layers_differ(cluster_stub, capsys):
    cluster_stub.images("head", ours=NEW)
    cluster_stub.images("worker", ours=NEW | {"Id": "sha256:" + "f" * 64})  # stored in another way
    assert images.copy(cluster_stub.config()) == Exit.OK
    assert "is the same on every node" in capsys.readouterr().err
    assert cluster_stub.calls("save", "load", "tag") == []


def test_an_image_that_was_cut_off_replaces_nothing(cluster_stub):
    cluster_stub.images("head", ours=NEW)
    cluster_stub.images("worker", ours=OLD)
    (cluster_stub.books / "cut").touch()
    with pytest.raises(LauncherError, match=r"node 1 \(10.0.0.2\): the image did not arrive: unexpected EOF"):
        images.copy(cluster_stub.config())
    assert ids(cluster_stub, "worker")[IMAGE] == "a"


def test_a_node_that_does_not_take_it_is_named(cluster_stub):
    cluster_stub.images("head", ours=NEW)
    cluster_stub.images("worker")
    cluster_stub.fail("load")
    with pytest.raises(LauncherError, match=r"node 1 \(10.0.0.2\): the image did not arrive: stub: told to fail"):
        images.copy(cluster_stub.config())


def test_what_arrives_damaged_is_refused(cluster_stub):
    cluster_stub.images("head", ours=NEW)
    cluster_stub.images("worker")
    (cluster_stub.books / "damage").touch()
    with pytest.raises(LauncherError, match=r"node 1 .*has other layers than node 0's"):
        images.copy(cluster_stub.config())


def test_progress_tells_bytes_of_each_node():
    sending = images.Sending("image", [], 4 << 30, lambda node, moved: None)
    sending.moved = {1: 1 << 30, 2: 3 << 29}
    assert sending.detail(2.0) == "node 1: 1.0 of about 4.0 GiB, 0.50 GiB/s, node 2: 1.5 of about 4.0 GiB, 0.75 GiB/s"


# A start


def checked(stub, *names: str, **changes: str):
    """Settings that leave out every check but these."""
    return stub.config(SKIP_CHECKS=",".join(name for name in preflight.CHECKS if name not in names), **changes)


def test_a_start_gives_the_other_nodes_the_image(cluster_stub):
    cluster_stub.images("head", ours=NEW)
    cluster_stub.images("worker", ours=OLD)
    assert cluster_life.start(checked(cluster_stub, "image")) == Exit.OK
    assert ids(cluster_stub, "worker") == {IMAGE: "c", PREVIOUS: "a"}
    assert len(cluster_stub.calls("save")) == 1
    record = json.loads((cluster_stub.run_dir / "tp2-run.json").read_text())
    assert record["image_recipe"] == "r" * 64


def test_nothing_is_sent_when_another_check_fails(cluster_stub, capsys):
    cluster_stub.images("head", ours=NEW)
    cluster_stub.images("worker")
    with pytest.raises(LauncherError, match=r"Nothing was started and nothing was stopped: address, image failed"):
        cluster_life.start(checked(cluster_stub, "image", "address"))
    assert cluster_stub.calls("save") == []


def test_a_start_without_an_image_says_how_to_make_one(cluster_stub, capsys):
    cluster_stub.images("head")
    cluster_stub.images("worker")
    with pytest.raises(LauncherError, match="image failed"):
        cluster_life.start(checked(cluster_stub, "image"))
    assert f"{IMAGE} is not there" in capsys.readouterr().err


# Status, and the words on the command line


def test_status_tells_each_node_and_where_the_image_is_from(cluster_stub, capsys):
    made = an_image("c", "l1", "new", recipe=recipe.digest())
    for node in ("head", "worker"):
        cluster_stub.images(node, ours=made, previous=OLD)
    assert images.status(cluster_stub.config()) == Exit.OK
    said = capsys.readouterr().out
    assert "built from: this checkout" in said and f"previous:   {PREVIOUS} is sha256:aaaaaaaaaaaa" in said
    assert said.count("sha256:cccccccccccc, 2 layers") == 2


@pytest.mark.parametrize(
    "worker, words",
    [
        ({}, "node 1:     missing; `./start.sh image copy`"),
        ({"ours": OLD}, "another one than node 0's; `./start.sh image copy`"),
        ({"ours": NEW}, "built from other sources than this checkout's (rrrrrrrrrrrr there"),
    ],
    ids=["missing", "other", "drift"],
)
def test_status_tells_what_is_wrong_and_what_to_type(cluster_stub, capsys, worker, words):
    cluster_stub.images("head", ours=NEW)
    cluster_stub.images("worker", **worker)
    assert images.status(cluster_stub.config()) == Exit.REFUSED
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("words, function", [
    (["build", "--offline"], "build"), (["pull"], "pull"), (["use", PREVIOUS], "use"), (["copy"], "copy"),
    (["status"], "status"),
])  # fmt: skip
def test_every_word_is_a_command(monkeypatch, words, function):
    called = []
    monkeypatch.setattr(images, function, lambda *arguments: called.append(arguments) or Exit.OK)
    settings = {"HEAD_IP": "10.0.0.1", "WORKER_IP": "10.0.0.2"}
    assert cluster.main(["start.sh", "tp2", "image", *words], settings) == Exit.OK
    assert len(called) == 1


def test_processes_have_no_image():
    settings = {"HEAD_IP": "10.0.0.1", "WORKER_IP": "10.0.0.2", "RUNTIME": "native", "NATIVE_PYTHON": "/opt/python"}
    with pytest.raises(LauncherError, match="RUNTIME=native uses none"):
        cluster.main(["start.sh", "tp2", "image", "status"], settings)
