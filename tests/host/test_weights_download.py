"""./download.sh against a small Hub: what is fetched, what is not, what goes wrong and is made good."""

from small_packs import read_folder

from launcher.weights import record


def test_everything_is_fetched_once_and_recorded(hub_machine):
    files = hub_machine.publish(shards=3)
    said = hub_machine.must()
    assert read_folder(hub_machine.model) == files
    assert "3 files" not in said
    assert hub_machine.hub.sent == {name: len(content) for name, content in files.items()}
    verified = record.read(hub_machine.model)
    assert verified.manifest.pack == "first/model"
    assert {entry.name for entry in verified.manifest.files} == set(files)
    assert record.unchanged(hub_machine.model, verified) == []
