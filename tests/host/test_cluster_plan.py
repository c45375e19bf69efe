"""Plans of whole clusters, compared with reviewed texts: UPDATE_PLANS=1 writes them anew."""

import os
import re
import shlex
from pathlib import Path

import pytest
from cluster_settings import ADMIN, CASES, SECRET, TOKEN, plan_of, settings

from launcher import cluster_plan as plans
from launcher.commands import NODE_ENVIRONMENT
from launcher.errors import LauncherError
from launcher.gpu_ways import WAYS

GOLDEN = Path(__file__).parent / "data/plans"

@pytest.mark.parametrize("name", CASES)
def test_plan_is_as_reviewed(name):
    config, is_found = CASES[name]
    text = plans.describe(plan_of(config(), is_found))
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_PLANS"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", CASES)
def test_plan_is_the_same_every_time(name):
    config, is_found = CASES[name]
    assert plans.describe(plan_of(config(), is_found)) == plans.describe(plan_of(config(), is_found))


@pytest.mark.parametrize("is_found", [True, False])
@pytest.mark.parametrize("executor", ["ray", "mp"])
def test_no_secret_is_printed_or_an_argument(executor, is_found):
    plan = plan_of(settings(VLLM_API_KEY=SECRET, EXECUTOR=executor), is_found)
    arguments = [word for rank in plan.ranks for unit in rank.units for word in
                 (*unit.start, *unit.state, *unit.logs, *unit.follow, *sum(unit.stop, ()))]  # fmt: skip
    assert not [word for word in (*arguments, *plan.ray_nodes) if SECRET in word or TOKEN in word or ADMIN in word]
    text = plans.describe(plan)
    assert SECRET not in text and TOKEN not in text and ADMIN not in text
    assert "VLLM_API_KEY=<set, not shown>" in text


@pytest.mark.parametrize(("geometry", "bytes_"), [("auto", 656), ("native", 656), ("padded", 656), ("compact", 528)])
def test_the_plan_says_what_a_token_costs(geometry, bytes_):
    said = [note for note in plan_of(settings(MLA_GEOMETRY=geometry)).notes if note.startswith("MLA_GEOMETRY")]
    assert len(said) == 1 and f"MLA_GEOMETRY={geometry}: {bytes_} bytes per token and layer" in said[0]


def test_secrets_are_in_private_files_only():
    plan = plan_of(settings(VLLM_API_KEY=SECRET))
    for of_rank_0 in (SECRET, ADMIN):
        holders = [file for rank in plan.ranks for file in rank.files if of_rank_0.encode() in file.content]
        assert [file.path for file in holders] == ["/srv/run/exl3-tp2-rank0/environment"]
    assert plan.ranks[0].env_file == "/srv/run/exl3-tp2-rank0/environment"
    assert {file.mode for rank in plan.ranks for file in rank.files if TOKEN.encode() in file.content} == {0o600}


def test_what_only_a_node_can_tell_is_named():
    of_nodes = {
        f"<found at start: node {rank} {what}>"
        for rank in (0, 1)
        for what in ("GID", "RDMA devices", "interface", "way to the GPU")
    }
    assert set(plans.make(settings()).unresolved) == of_nodes | {"<found at start: image id>", "<made at start>"}
    assert plan_of(settings()).unresolved == []


def test_settings_of_a_node_need_not_be_found():
    plan = plans.make(settings(WORKER_CX7_IF="enp9", WORKER_CX7_IB="roce9", WORKER_GID=4))
    assert [word for word in plan.unresolved if "node 1" in word] == ["<found at start: node 1 way to the GPU>"]
    assert plan.ranks[1].environment["NCCL_IB_HCA"] == "=roce9"
    assert plan.ranks[1].environment["NCCL_IB_GID_INDEX"] == "4"


def blank(text: str, rank: plans.RankPlan) -> str:
    """What the rank's name and address appear in is no difference."""
    for way in WAYS.values():
        text = text.replace(f" {' '.join(way)} ", " WAY ")
    text = text.replace(rank.name, "OWN").replace(f"--node-ip-address {rank.address}", "--node-ip-address OWN")
    return re.sub(r"exl3\.rank=\d", "exl3.rank=N", text)


# What stands for the rank in the command of Ray or of vLLM.
ROLES = (r"--head --port \d+ --include-dashboard false", r"--address \S+", r"--node-rank \d", r" --headless$")


@pytest.mark.parametrize("name", ["tp2-ray-docker", "tp2-mp-docker", "tp4-ray-docker", "tp3"])
def test_ranks_are_equal_but_for_the_named_fields(name):
    plan = plan_of(CASES[name][0]())
    seen = set()
    for rank in plan.ranks:
        command = blank(" ".join(rank.units[0].start), rank)
        for role in ROLES:
            command = re.sub(role, "", command)
        # Rank 0 keeps its files beside the checkout.
        command = " ".join(command.replace("/srv/run", "/srv/exl3").split())
        shared = tuple(sorted((k, v) for k, v in rank.environment.items() if k not in NODE_ENVIRONMENT))
        seen.add((command, shared))
    assert len(seen) == 1


def test_order_of_a_node():
    head, worker = plan_of(settings()).ranks
    assert [unit.name for unit in head.units] == ["ray", "server"] and [unit.name for unit in worker.units] == ["ray"]
    assert head.make_folders[:3] == ["mkdir", "-p", "--"]
    assert head.units[0].stop[-1] == ("docker", "rm", "--force", "--volumes", "exl3-tp2-rank0")


def test_ports_are_listed_and_can_be_checked():
    plan = plan_of(settings())
    assert plans.fixed_ports(plan, 0)[0] == 6379 and 8888 in plans.fixed_ports(plan, 0)
    assert 8888 not in plans.fixed_ports(plan, 1) and 6379 not in plans.fixed_ports(plan, 1)
    assert 6430 in plans.fixed_ports(plan, 1)
    assert plans.fixed_ports(plan_of(settings(EXECUTOR="mp")), 0) == [8888, 29501]
    assert [port.bind for port in plan.ports if port.owner == "API"] == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("changes", "url"),
    [({}, "http://127.0.0.1:8888"), ({"BIND": "0.0.0.0"}, "http://127.0.0.1:8888"),
     ({"BIND": "10.10.0.1", "PORT": 9000}, "http://10.10.0.1:9000")],
)  # fmt: skip
def test_url_is_where_the_api_listens(changes, url):
    assert plan_of(settings(**changes)).url == url


def test_sources_of_settings_are_told():
    text = plans.describe(plan_of(settings(PORT=9000)))
    assert re.search(r"^PORT=9000  \(\.env line \d+\)$", text, re.MULTILINE)


def test_forbidden_combinations_are_told_all_at_once():
    with pytest.raises(LauncherError) as refused:
        plans.make(settings(MOE_BACKEND="marlin", EXTRA_ARGS="--port 1"))
    assert "marlin" in str(refused.value) and "set PORT instead" in str(refused.value)


def test_printed_commands_can_be_pasted():
    plan = plan_of(settings(EXTRA_ARGS='--chat-template "/a b/it\'s.jinja"'))
    start = plan.ranks[0].units[-1].start
    assert shlex.split(plans.block(start).replace("\\\n", " ")) == list(start)
