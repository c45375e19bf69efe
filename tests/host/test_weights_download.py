"""./download.sh against a small Hub: what is fetched, what is not, what goes wrong and is made good."""

import dataclasses
import re

import pytest
from hub_server import SECRET, Fault, git_sha1, sha256
from huggingface_hub import constants
from small_packs import STALE, draft_files, fill_cache, model_files, read_folder, write_folder

from launcher.errors import Exit
from launcher.weights import meter, packs, patience, place, record

SHARD = "model-00002-of-00003.safetensors"


def test_everything_is_fetched_once_and_recorded(hub_machine):
    files = hub_machine.publish(shards=3)
    hub_machine.must()
    assert read_folder(hub_machine.model) == files
    assert hub_machine.hub.sent == {name: len(content) for name, content in files.items()}
    verified = record.read(hub_machine.model)
    assert verified.manifest.pack == "first/model"
    assert {entry.name: entry.sha256 for entry in verified.manifest.files} == {
        name: sha256(content) for name, content in files.items()
    }
    assert record.changed(hub_machine.model, verified) == []
    assert not (hub_machine.model / ".partial").exists()


def test_a_second_run_asks_nobody(hub_machine, monkeypatch):
    hub_machine.publish(shards=3)
    hub_machine.must()
    asked = len(hub_machine.hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "nothing to do" in hub_machine.must()
    assert len(hub_machine.hub.requests) == asked


def test_the_draft_comes_along_and_its_licence_is_said_once(hub_machine):
    hub_machine.publish(shards=3)
    said = hub_machine.must(SPEC_METHOD="dflash")
    assert said.count("CC BY-NC-ND 4.0") == 1 and "no commercial use" in said
    assert read_folder(hub_machine.draft) == draft_files()
    assert "CC BY-NC-ND" not in hub_machine.must(SPEC_METHOD="dflash")


def test_a_resumed_download_does_not_say_the_licence_again(hub_machine):
    hub_machine.publish(shards=3)
    hub_machine.hub.faults = [Fault("/lfs/", status=403, times=99)]
    assert "CC BY-NC-ND" in hub_machine.call(SPEC_METHOD="dflash", MODEL_DIR=str(hub_machine.model)).said
    hub_machine.hub.faults = []
    (hub_machine.draft / ".partial").mkdir(parents=True, exist_ok=True)
    assert "Licence of" not in hub_machine.must(SPEC_METHOD="dflash")


def test_a_dry_run_lists_and_changes_nothing(hub_machine):
    files = hub_machine.publish(shards=3)
    said = hub_machine.must("--dry-run")
    assert all(re.search(rf"^ +{len(content)}  {re.escape(name)}  \(first/model\)$", said, re.M)
               for name, content in files.items())  # fmt: skip
    assert not hub_machine.model.exists()
    assert not hub_machine.hub.sent


# What the network does

PASSING = {
    "too many requests": ([Fault(SHARD, status=429, headers={"Retry-After": "0"})], r"HTTP 429; trying again in 0 s"),
    "rate limit of the storage": ([Fault("/lfs/", status=429)], r"HTTP 429; trying again in 0.01 s \(1 of"),
    "server error": ([Fault(SHARD, status=500)], r"HTTP 500; trying again"),
    "bad gateway, thrice": ([Fault(SHARD, status=502, times=3)], r"HTTP 502; trying again in 0.04 s \(3 of"),
    "unavailable on the way": ([Fault("/lfs/", status=503)], r"HTTP 503; trying again"),
    "dropped": ([Fault("/lfs/", cut=20_000)], r"RemoteProtocolError .*; trying again"),
    "dropped at once": ([Fault("/lfs/", cut=0)], r"RemoteProtocolError .*; trying again"),
    "dropped often": ([Fault("/lfs/", cut=5_000, times=9)], r"trying again"),
    "a body that is too short and says so": ([Fault("/lfs/", short=100)], r"the stream ended at \d+ of \d+ bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSING)
def test_what_passes_is_waited_for_by_name_and_nothing_comes_twice(hub_machine, name):
    files = hub_machine.publish(shards=3)
    hub_machine.hub.faults, said = PASSING[name]
    assert re.search(said, hub_machine.must("--streams", "1"))
    assert read_folder(hub_machine.model) == files
    assert hub_machine.hub.sent == {name: len(content) for name, content in files.items()}


def test_a_stream_that_stalls_is_opened_again(hub_machine, monkeypatch):
    files = hub_machine.publish(shards=3)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    hub_machine.hub.faults = [Fault("/lfs/", stall_s=3)]
    assert re.search(r"model-\S+: ReadTimeout .*; trying again in 0.01 s", hub_machine.must())
    assert read_folder(hub_machine.model) == files


def test_a_slow_stream_is_waited_for(hub_machine):
    files = hub_machine.publish(shards=3)
    hub_machine.hub.bytes_per_s = 100_000
    assert "trying again" not in hub_machine.must()
    assert read_folder(hub_machine.model) == files


def test_a_server_without_ranges_sends_that_file_again(hub_machine):
    files = hub_machine.publish(shards=3)
    hub_machine.hub.faults = [Fault("/lfs/", cut=20_000), Fault("/lfs/", no_ranges=True)]
    hub_machine.must("--streams", "1")
    assert read_folder(hub_machine.model) == files
    assert hub_machine.hub.sent.total() == sum(map(len, files.values())) + 20_000


def test_a_list_that_fails_once_is_asked_for_again(hub_machine):
    files = hub_machine.publish(shards=3)
    hub_machine.hub.faults = [Fault("/tree/", status=503)]
    hub_machine.must()
    assert read_folder(hub_machine.model) == files


def test_a_hub_that_does_not_answer_is_told(hub_machine, monkeypatch):
    hub_machine.publish(shards=3)
    hub_machine.hub.close()
    done = hub_machine.call()
    assert done.code == Exit.REFUSED
    assert f"first/model: {hub_machine.hub.url} does not say what it holds (ConnectError" in done.said


def test_an_end_that_does_not_come_is_an_error_and_what_arrived_stays(hub_machine, monkeypatch):
    files = hub_machine.publish(shards=3)
    monkeypatch.setattr(patience, "ATTEMPTS", 2)
    monkeypatch.setattr(patience, "FIRST_WAIT_S", 0.001)
    blob = f"/lfs/{sha256(files[SHARD])}"
    hub_machine.hub.faults = [Fault(blob, cut=20_000), Fault(blob, cut=0, times=99)]
    done = hub_machine.call()
    assert done.code == Exit.REFUSED
    assert re.search(rf"{SHARD}: RemoteProtocolError .*, after 2 attempts .* run ./download.sh again", done.said)
    assert record.read(hub_machine.model) is None
    hub_machine.hub.faults = []
    hub_machine.must()
    assert read_folder(hub_machine.model) == files
    assert hub_machine.hub.sent == {name: len(content) for name, content in files.items()}


def test_wrong_bytes_are_fetched_once_more(hub_machine):
    files = hub_machine.publish(shards=3)
    hub_machine.hub.faults = [Fault(f"/lfs/{sha256(files[SHARD])}", wrong_at=1_000)]
    expected = f"wrong bytes, once more from the beginning: {SHARD}: expected SHA-256 {sha256(files[SHARD])}"
    assert expected in hub_machine.must()
    assert read_folder(hub_machine.model) == files
    assert hub_machine.hub.sent[SHARD] == 2 * len(files[SHARD])
    assert all(count == len(files[name]) for name, count in hub_machine.hub.sent.items() if name != SHARD)


def test_a_small_file_with_wrong_bytes_is_noticed_too(hub_machine):
    files = hub_machine.publish(shards=3)
    hub_machine.hub.faults = [Fault("/resolve/.*/tokenizer.json", wrong_at=0)]
    said = hub_machine.must()
    assert f"tokenizer.json: expected git's SHA-1 {git_sha1(files['tokenizer.json'])}" in said
    assert read_folder(hub_machine.model) == files


@pytest.mark.parametrize("fault", [{"wrong_at": 1_000}, {"longer": 7}], ids=["wrong", "longer"])
def test_bytes_that_stay_wrong_never_get_their_name(hub_machine, monkeypatch, fault):
    files = hub_machine.publish(shards=3)
    monkeypatch.setattr(patience, "ATTEMPTS", 2)
    hub_machine.hub.faults = [Fault(f"/lfs/{sha256(files[SHARD])}", times=99, **fault)]
    done = hub_machine.call()
    assert done.code == Exit.REFUSED and SHARD in done.said
    assert not (hub_machine.model / SHARD).exists()
    assert record.read(hub_machine.model) is None


def test_a_revision_that_moves_between_two_files_is_refused(hub_machine):
    files = hub_machine.publish(shards=3)
    hub_machine.hub.faults = [Fault(f"/resolve/.*/{SHARD}", commit="e" * 40, times=99)]
    done = hub_machine.call()
    assert done.code == Exit.REFUSED
    claimed = "answered with revision eeeeeeeeeeee of first/model, aaaaaaaaaaaa"
    assert f"{SHARD}: {hub_machine.hub.url} {claimed}" in done.said
    assert not (hub_machine.model / SHARD).exists()
    assert record.read(hub_machine.model) is None
    assert set(read_folder(hub_machine.model)) < set(files)


def test_tokens_go_to_the_hub_and_signatures_nowhere(hub_machine):
    hub_machine.publish(shards=3)
    hub_machine.hub.faults = [Fault("/lfs/", status=400, times=99)]
    done = hub_machine.call(HF_TOKEN="hf_secretsecret")
    assert done.code == Exit.REFUSED and "/lfs/" in done.said
    assert SECRET not in done.said and "hf_secretsecret" not in done.said
    assert "Bearer hf_secretsecret" in hub_machine.hub.tokens


# What the Hub no longer has


@pytest.mark.parametrize("status", [401, 403, 404, 451])
def test_a_pack_that_is_gone_is_never_replaced_unasked(hub_machine, status):
    hub_machine.publish(shards=3)
    hub_machine.hub.faults = [Fault("/api/models/first/", status=status, times=99)]
    done = hub_machine.call()
    assert done.code == Exit.REFUSED
    assert re.search(rf"first/model at aaaaaaaaaaaa is not to be had from \S+ \(HTTP {status}", done.said)
    assert "second/model (the same bytes, licence ShapleyMCG: read its terms): WEIGHTS_SOURCE=second/model" in done.said
    assert "third/model (another conversion" in done.said
    assert not hub_machine.model.exists() and not hub_machine.hub.sent


@pytest.mark.parametrize("how", ["--yes", "setting"])
def test_the_twin_is_taken_when_the_user_says_so(hub_machine, how):
    files = hub_machine.publish(shards=3)
    del hub_machine.hub.repos["first/model"]
    said = hub_machine.must("--yes") if how == "--yes" else hub_machine.must(WEIGHTS_SOURCE="second/model")
    assert "Licence of second/model: ShapleyMCG" in said
    assert read_folder(hub_machine.model) == files
    assert record.read(hub_machine.model).manifest.pack == "second/model"


def test_a_pack_that_goes_in_the_middle_leaves_what_its_twin_goes_on_with(hub_machine):
    files = hub_machine.publish(shards=3)
    hub_machine.hub.faults = [Fault(f"/resolve/a+/{SHARD}", status=404, times=99)]
    done = hub_machine.call("--streams", "1")
    assert done.code == Exit.REFUSED and "WEIGHTS_SOURCE=second/model" in done.said
    hub_machine.must(WEIGHTS_SOURCE="second/model")
    assert read_folder(hub_machine.model) == files
    assert hub_machine.hub.sent == {name: len(content) for name, content in files.items()}


def test_a_gated_pack_says_where_access_is_given(hub_machine):
    hub_machine.publish(shards=3)
    hub_machine.hub.faults = [Fault("/api/models/first/", status=403, headers={"X-Error-Code": "GatedRepo"}, times=9)]
    said = hub_machine.call().said
    assert "(HTTP 403 GatedRepo); https://huggingface.co/first/model tells how to get access" in said


def test_a_draft_that_is_gone_has_no_other_source(hub_machine):
    hub_machine.publish(shards=3)
    del hub_machine.hub.repos["some/draft"]
    done = hub_machine.call(SPEC_METHOD="dflash")
    assert done.code == Exit.REFUSED and "There is no other source of it" in done.said


def test_offline_says_so(hub_machine, monkeypatch):
    hub_machine.publish(shards=3)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = hub_machine.call()
    assert done.code == Exit.REFUSED and "HF_HUB_OFFLINE is set" in done.said and "--from DIR" in done.said
    assert hub_machine.hub.requests == []


# The Hub's cache


def inodes(folder):
    return {path.name: path.stat().st_ino for path in folder.rglob("*.safetensors")}


def test_a_whole_snapshot_is_adopted_without_a_second_copy(hub_machine, monkeypatch):
    files = hub_machine.publish(shards=3)
    snapshot = fill_cache(hub_machine.cache, hub_machine.table[0], files)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = hub_machine.must()
    assert read_folder(hub_machine.model) == files
    assert inodes(hub_machine.model) == inodes(snapshot)
    assert "to be linked from this machine: 7 files" in said
    assert not any(path.is_symlink() for path in hub_machine.model.rglob("*"))
    assert hub_machine.hub.requests == []


def test_a_twin_in_the_cache_is_adopted_and_named(hub_machine):
    files = hub_machine.publish(shards=3)
    fill_cache(hub_machine.cache, hub_machine.table[1], files)
    said = hub_machine.must()
    assert "second/model holds the same bytes as first/model; licence ShapleyMCG" in said
    assert read_folder(hub_machine.model) == files and hub_machine.hub.requests == []


def test_another_conversion_in_the_cache_is_adopted_unless_one_is_asked_for(hub_machine):
    files = hub_machine.publish(shards=3)
    fill_cache(hub_machine.cache, hub_machine.table[2], model_files(4, seed=77))
    hub_machine.must(WEIGHTS_SOURCE="first/model", MODEL_DIR=str(hub_machine.root / "asked"))
    assert read_folder(hub_machine.root / "asked") == files
    assert "third/model holds another conversion than the default first/model" in hub_machine.must()
    assert record.read(hub_machine.model).manifest.pack == "third/model"


def test_the_cache_is_left_out_when_the_user_says_so(hub_machine):
    files = hub_machine.publish(shards=3)
    fill_cache(hub_machine.cache, hub_machine.table[0], files)
    hub_machine.must("--ignore-cache")
    assert hub_machine.hub.sent.total() == sum(map(len, files.values()))


def test_one_dangling_link_among_120_shards_is_all_that_is_fetched(hub_machine):
    files = hub_machine.publish(shards=120)
    snapshot = fill_cache(hub_machine.cache, hub_machine.table[0], files)
    name = "model-00077-of-00120.safetensors"
    (snapshot / name).resolve().unlink()
    said = hub_machine.must()
    assert f"1 links that lead nowhere, first {name}" in said
    assert hub_machine.hub.sent == {name: len(files[name])}
    assert read_folder(hub_machine.model) == files


def test_a_loop_of_links_in_the_cache_is_a_link_that_leads_nowhere(hub_machine):
    files = hub_machine.publish(shards=3)
    snapshot = fill_cache(hub_machine.cache, hub_machine.table[0], files)
    (snapshot / SHARD).unlink()
    (snapshot / SHARD).symlink_to(SHARD)
    (snapshot / "assets" / "again").symlink_to("../assets")
    assert "2 links that lead nowhere, first assets/again" in hub_machine.must()
    assert read_folder(hub_machine.model) == files
    assert not hub_machine.hub.sent  # its blob is there, whatever the link says


def test_a_snapshot_without_the_tokenizer_is_not_whole(hub_machine):
    """As some engines leave it, which fetch only what they read."""
    files = hub_machine.publish(shards=3)
    snapshot = fill_cache(hub_machine.cache, hub_machine.table[0], files)
    (snapshot / "tokenizer.json").resolve().unlink()
    (snapshot / "tokenizer.json").unlink()
    hub_machine.must()
    assert read_folder(hub_machine.model) == files
    assert hub_machine.hub.sent == {"tokenizer.json": 2}


def test_a_stale_snapshot_gives_what_it_shares_and_is_not_served(hub_machine):
    files = hub_machine.publish(shards=3)
    stale = files | {SHARD: model_files(3, seed=5)[SHARD], "config.json": b'{"old": 1}'}
    fill_cache(hub_machine.cache, hub_machine.table[0], stale, revision=STALE)
    hub_machine.must()
    assert read_folder(hub_machine.model) == files
    assert hub_machine.hub.sent == {name: len(files[name]) for name in (SHARD, "config.json")}


def test_a_stale_snapshot_beside_the_active_one_plays_no_part(hub_machine):
    files = hub_machine.publish(shards=3)
    fill_cache(hub_machine.cache, hub_machine.table[0], model_files(3, seed=5), revision=STALE)
    fill_cache(hub_machine.cache, hub_machine.table[0], files)
    hub_machine.must()
    assert read_folder(hub_machine.model) == files and hub_machine.hub.requests == []


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_blob_is_not_used_and_fetched_instead(hub_machine):
    files = hub_machine.publish(shards=3)
    snapshot = fill_cache(hub_machine.cache, hub_machine.table[0], files)
    damage((snapshot / SHARD).resolve())
    assert f"not used: {SHARD}: expected SHA-256 {sha256(files[SHARD])}" in hub_machine.must()
    assert read_folder(hub_machine.model) == files
    assert hub_machine.hub.sent == {SHARD: len(files[SHARD])}


def test_a_damaged_part_is_begun_again(hub_machine):
    """As a loss of power leaves it: the size is there, the bytes are not."""
    files = hub_machine.publish(shards=3)
    part = place.part_of(hub_machine.model, SHARD)
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(9_000))
    said = hub_machine.must()
    assert f"wrong bytes, once more from the beginning: {SHARD}" in said
    assert read_folder(hub_machine.model) == files


def test_a_damaged_blob_without_a_network_is_an_error(hub_machine, monkeypatch):
    files = hub_machine.publish(shards=3)
    snapshot = fill_cache(hub_machine.cache, hub_machine.table[0], files)
    damage((snapshot / SHARD).resolve())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = hub_machine.call()
    assert done.code == Exit.REFUSED and "this copy of the weights is damaged" in done.said
    assert not (hub_machine.model / SHARD).exists() and record.read(hub_machine.model) is None


# What is in the folder already


def test_files_that_are_there_are_hashed_and_kept(hub_machine):
    files = hub_machine.publish(shards=3)
    write_folder(hub_machine.model, {name: content for name, content in files.items() if name != SHARD})
    hub_machine.must()
    assert hub_machine.hub.sent == {SHARD: len(files[SHARD])}
    assert read_folder(hub_machine.model) == files


def test_a_bad_file_is_moved_aside_and_only_it_is_fetched(hub_machine):
    files = hub_machine.publish(shards=3)
    hub_machine.must()
    before = hub_machine.hub.sent.copy()
    damage(hub_machine.model / SHARD)
    wrong = (hub_machine.model / SHARD).read_bytes()
    assert "moved aside" in hub_machine.must()
    assert hub_machine.hub.sent - before == {SHARD: len(files[SHARD])}
    assert read_folder(hub_machine.model) == files
    assert (hub_machine.model / ".aside" / SHARD).read_bytes() == wrong


def test_links_out_of_the_folder_become_files(hub_machine):
    """A container mounts the folder alone."""
    files = hub_machine.publish(shards=3)
    snapshot = fill_cache(hub_machine.cache, hub_machine.table[0], files)
    hub_machine.model.mkdir()
    for name in files:
        (hub_machine.model / name).parent.mkdir(exist_ok=True)
        (hub_machine.model / name).symlink_to((snapshot / name).resolve())
    hub_machine.must()
    assert not any(path.is_symlink() for path in hub_machine.model.glob("*"))
    assert inodes(hub_machine.model) == inodes(snapshot) and hub_machine.hub.requests == []


def test_a_loop_of_links_in_the_folder_is_moved_aside(hub_machine):
    files = hub_machine.publish(shards=3)
    hub_machine.model.mkdir()
    (hub_machine.model / SHARD).symlink_to(SHARD)
    expected = f"{SHARD}: expected a file of {len(files[SHARD])} bytes, found a link that leads nowhere"
    assert expected in hub_machine.must()
    assert read_folder(hub_machine.model) == files


def test_a_folder_of_dangling_links_is_filled(hub_machine):
    files = hub_machine.publish(shards=3)
    hub_machine.model.mkdir()
    for name in files:
        (hub_machine.model / name).parent.mkdir(exist_ok=True)
        (hub_machine.model / name).symlink_to("/nowhere")
    hub_machine.must()
    assert read_folder(hub_machine.model) == files


@pytest.mark.parametrize("other", [model_files(3, filler=8, seed=3), model_files(3, seed=3), model_files(4, seed=3)],
                         ids=["other sizes", "same sizes", "other names"])  # fmt: skip
def test_another_checkpoint_is_left_alone(hub_machine, other):
    hub_machine.publish(shards=3)
    write_folder(hub_machine.model, other)
    done = hub_machine.call()
    assert done.code == Exit.REFUSED
    assert "holds another checkpoint than first/model" in done.said and "set MODEL_DIR to another folder" in done.said
    assert read_folder(hub_machine.model) == other


def test_another_pack_than_was_asked_for_is_left_alone(hub_machine):
    hub_machine.publish(shards=3)
    hub_machine.must()
    before = read_folder(hub_machine.model)
    done = hub_machine.call(WEIGHTS_SOURCE="third/model")
    assert done.code == Exit.REFUSED and "holds first/model, and WEIGHTS_SOURCE asks for third/model" in done.said
    assert read_folder(hub_machine.model) == before


def test_another_revision_in_the_table_brings_only_what_differs(hub_machine, monkeypatch):
    files = hub_machine.publish(shards=3)
    hub_machine.must()
    newer = {**files, SHARD: model_files(3, seed=5)[SHARD], "tokenizer.json": b"[]"}  # of the same sizes
    del newer["assets/notes.md"]
    table = (dataclasses.replace(hub_machine.table[0], revision="e" * 40), *hub_machine.table[1:])
    monkeypatch.setattr(packs, "PACKS", table)
    hub_machine.hub.repos["first/model"]["e" * 40] = newer
    sent = hub_machine.hub.sent.copy()
    hub_machine.must()
    assert hub_machine.hub.sent - sent == {name: len(newer[name]) for name in (SHARD, "tokenizer.json")}
    assert read_folder(hub_machine.model) == newer
    assert record.read(hub_machine.model).manifest.revision == "e" * 40
    assert (hub_machine.model / ".aside/assets/notes.md").exists()


def test_a_checkpoint_whose_headers_are_wrong_gets_no_record(hub_machine):
    files = hub_machine.publish(shards=3)
    index = files["model.safetensors.index.json"].replace(b"up_proj.suh", b"up_proj.sux")
    hub_machine.hub.repos["first/model"]["a" * 40]["model.safetensors.index.json"] = index
    done = hub_machine.call()
    assert done.code == Exit.REFUSED and "up_proj.sux, unlike the index" in done.said
    assert record.read(hub_machine.model) is None


# Progress


def test_the_meter_says_rate_and_time_left():
    now = iter([0.0, 10.0, 20.0, 40.0, 60.0])
    counted = meter.Meter(10 << 30, 1 << 30, clock=lambda: next(now))
    counted.add(1 << 30)
    assert counted.text() == "2.0 GiB of 10.0 GiB, 102.4 MiB/s, 1 min left"
    counted.add(1 << 30)
    assert counted.text() == "3.0 GiB of 10.0 GiB, 102.4 MiB/s, 1 min left"
    assert counted.text().startswith("3.0 GiB of 10.0 GiB, 34.1 MiB/s")  # lately, not since the beginning
    assert counted.text() == "3.0 GiB of 10.0 GiB, 0 B/s"


def test_the_table_is_pinned_and_says_what_restricts():
    for pack in packs.PACKS:
        assert re.fullmatch(r"[0-9a-f]{40}", pack.revision) and pack.shards and pack.bytes > 1 << 30
        assert bool(pack.restricts) == (pack.licence != "Apache-2.0")
    default, twin = packs.of_kind("model")[:2]
    assert default.id == "Mia-AiLab/GLM-5.3-Flash-EXL3-TR3-4bpw" and packs.twins(default) == [twin]


@pytest.mark.parametrize("source", ["hub", "cache"])
def test_progress_counts_every_byte_once(hub_machine, monkeypatch, source):
    files = hub_machine.publish(shards=3)
    if source == "cache":
        fill_cache(hub_machine.cache, hub_machine.table[0], files)
    meters = []

    class Kept(meter.Meter):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            meters.append(self)

    monkeypatch.setattr("launcher.weights.download.Meter", Kept)
    hub_machine.hub.faults = [Fault("/lfs/", cut=9_000), Fault("/lfs/", no_ranges=True), Fault("/lfs/", wrong_at=3)]
    hub_machine.must("--streams", "1")
    assert [(one.done, one.total) for one in meters[-1:]] == [(meters[-1].total,) * 2]
    assert sum(one.done for one in meters) == sum(map(len, files.values()))


def test_settings_of_several_topologies_must_agree(hub_machine):
    hub_machine.publish(shards=3)
    del hub_machine.settings["MODEL_DIR"]
    (hub_machine.home / ".env").write_text(f"MODEL_DIR={hub_machine.model}\nHEAD_IP=\n")
    (hub_machine.home / ".env.tp4").write_text("MODEL_DIR=/elsewhere\n")
    done = hub_machine.call("--dry-run")
    assert done.code == Exit.USAGE and "MODEL_DIR differs (.env: " in done.said
    assert str(hub_machine.model) in hub_machine.must("--dry-run", "--settings", ".env")
