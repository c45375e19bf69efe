"""What is measured between two nodes, and that measuring ends by itself; a program stands in for perftest's."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from recorded import context, interface
from stub_cluster import SSH

from launcher import cluster_life, link_runs, preflight
from launcher.facts import LinkRun
from launcher.findings import PASS, WARN

FIRST, SECOND = "rocep1s0f1", "roceP2p1s0f1"

# As perftest 4.5 prints it with --report_gbits.
REPORT = """\
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF          Device         : rocep1s0f1
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      353192           0.00               92.59              0.176600
---------------------------------------------------------------------------------------
"""

PROGRAM = """#!{python}
import os, socket, sys, time
from pathlib import Path
words, books = sys.argv[1:], Path({books!r})
port, is_client = int(words[words.index("-p") + 1]), words[-1].count(".") == 3
role = "client" if is_client else "server"
(books / (role + str(os.getpid()))).write_text(" ".join(words))
if (books / ("fail-" + role)).exists():
    sys.exit(role + ": told to fail")
if is_client:
    socket.create_connection(("127.0.0.1", port)).close()
    print({report!r})
else:
    socket.create_server(("127.0.0.1", port)).accept()
    time.sleep(60)  # longer than any measurement
"""


class Perftest:
    def __init__(self, folder: Path) -> None:
        self.books = folder / "books"
        self.program = folder / "bin" / "ib_write_bw"
        for path in (self.books, self.program.parent, self.books / "worker-home"):
            path.mkdir(parents=True, exist_ok=True)
        self.program.write_text(PROGRAM.format(python=sys.executable, books=str(self.books), report=REPORT))
        (folder / "bin" / "ssh").write_text(SSH.format(books=self.books))
        for path in self.program.parent.iterdir():
            path.chmod(0o755)

    def context(self, name="good_tp2", **changes):
        def install(records):
            for record in records:
                record["probe"]["host"]["ib_write_bw"] = str(self.program)
                record.pop("link_runs", None)

        return context(name, install, **changes)

    def said(self, role: str) -> list[str]:
        return sorted(path.read_text() for path in self.books.glob(f"{role}[0-9]*"))

    def left(self) -> list[str]:
        """Command lines of what still runs; what is being ended has a moment to go."""
        end = time.monotonic() + 2
        while (lines := self.running()) and time.monotonic() < end:
            time.sleep(0.02)
        return lines

    def running(self) -> list[str]:
        lines = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    lines.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
                except OSError:
                    continue
        return [line for line in lines if str(self.program) in line]


@pytest.fixture
def perftest(tmp_path, monkeypatch):
    made = Perftest(tmp_path)
    monkeypatch.setenv("PATH", f"{made.program.parent}{os.pathsep}{os.environ['PATH']}")
    return made


def with_program(records):
    for record in records:
        record["probe"]["host"]["ib_write_bw"] = "/usr/bin/ib_write_bw"


def test_both_rails_are_measured_and_nothing_stays(perftest):
    runs = link_runs.with_runs(perftest.context()).facts[1].link_runs
    assert runs == (LinkRun(FIRST, FIRST, 92.59), LinkRun(SECOND, SECOND, 92.59))
    assert perftest.left() == []
    servers, clients = perftest.said("server"), perftest.said("client")
    assert [words.split()[:6] for words in servers] == [
        ["-d", SECOND, "-i", "1", "-x", "3"], ["-d", FIRST, "-i", "1", "-x", "3"],
    ]  # fmt: skip
    assert [words.split()[:6] for words in clients] == [
        ["-d", SECOND, "-i", "1", "-x", "5"], ["-d", FIRST, "-i", "1", "-x", "5"],
    ]  # fmt: skip
    assert [words.split()[-1] for words in clients] == ["192.168.101.10", "192.168.100.10"]
    assert all("--report_gbits" in words for words in servers + clients)


@pytest.mark.parametrize("role, said", [("server", "node 0: server: told to fail"),
                                        ("client", "node 1: client: told to fail")])  # fmt: skip
def test_a_side_that_fails_is_told_and_the_other_ends(perftest, role, said):
    (perftest.books / f"fail-{role}").touch()
    began, made = time.monotonic(), perftest.context()
    measured = link_runs.with_runs(made).facts[1]
    runs = measured.link_runs
    assert [(run.gbps, run.problem) for run in runs] == [(None, said)] * 2
    warned = [one for one in preflight.CHECKS[link_runs.CHECK](replace(made, facts=(made.facts[0], measured)))]
    assert [one.level for one in warned] == [WARN, WARN]
    assert f"type `{perftest.program} -d {FIRST} -i 1 -x 3 -p 18515 -D 2 -F --report_gbits` on node 0, then `" in (
        warned[0].fix
    )
    assert "-x 5 -p 18515 -D 2 -F --report_gbits 192.168.100.10` on node 1" in warned[0].fix
    assert time.monotonic() - began < link_runs.LIMIT_S
    assert perftest.left() == []


def test_a_client_that_hangs_ends_in_its_time(perftest, monkeypatch):
    monkeypatch.setattr(link_runs, "LIMIT_S", 3)
    hanging = perftest.program.read_text().replace("if is_client:", "if is_client:\n    time.sleep(60)")
    perftest.program.write_text(hanging)
    runs = link_runs.with_runs(perftest.context(HEAD_CX7_IB=FIRST)).facts[1].link_runs
    assert [run.gbps for run in runs] == [None] and "node 1: exit status 124" in runs[0].problem
    assert perftest.left() == []


def test_a_setting_chooses_rail_and_index(perftest):
    link_runs.with_runs(perftest.context(WORKER_CX7_IB=f"{FIRST}:1", WORKER_GID=5))
    assert [words.split()[:6] for words in perftest.said("client")] == [["-d", FIRST, "-i", "1", "-x", "5"]]


def test_nodes_share_the_first_one_s_rails_one_after_the_other():
    made = context("good_tp4", with_program)
    wanted = [pairing for rank in (1, 2, 3) for pairing in link_runs.pairings(made, rank)]
    rounds = link_runs.rounds(wanted)
    assert [[(one.there.node.rank, one.here.rail.device) for one in own] for own in rounds] == [
        [(rank, FIRST), (rank, SECOND)] for rank in (1, 2, 3)
    ]


@pytest.mark.parametrize("text, gbps", [
    (REPORT, 92.59), ("", None), ("Couldn't connect to 10.0.0.1:18515", None),
    (REPORT.replace("Gb/sec", "MiB/sec"), None),
])  # fmt: skip
def test_report_is_read(text, gbps):
    assert link_runs.read_gbps(text) == gbps


# What stands in the way


def obstacle(change=with_program, name="good_tp2", **changes):
    made = context(name, change, **changes)
    return link_runs.obstacle(made, made.facts[1])


def test_nothing_stands_in_the_way_of_idle_nodes_with_the_program():
    assert obstacle() is None


def running(rank, name):
    def change(records):
        with_program(records)
        records[rank]["probe"]["containers"] = [{"id": "cd" * 32, "name": name, "image": "x"}]

    return change


@pytest.mark.parametrize("rank, name", [(0, "exl3-tp2-rank0"), (1, "exl3-tp2-rank1"), (1, "exl3-tp4-rank3")])
def test_a_running_cluster_is_not_disturbed(rank, name):
    verdict = obstacle(running(rank, name))
    assert verdict.level == PASS and verdict.seen.startswith("not measured while the cluster runs")


def test_a_container_of_others_does_not_count():
    assert obstacle(running(1, "exl3-tp2-rank1-copy")) is None


def test_a_missing_program_is_named_with_what_brings_it():
    def change(records):
        with_program(records)
        records[0]["probe"]["host"]["ib_write_bw"] = ""

    verdict = obstacle(change)
    assert (verdict.level, verdict.seen) == (WARN, "not measured: no ib_write_bw on node 0")
    assert "apt-get install perftest" in verdict.fix


def test_rails_without_a_common_network_are_not_measured():
    def change(records):
        with_program(records)
        for device in (FIRST, SECOND):
            interface(records, 1, device)["state"] = "DOWN"

    assert obstacle(change).seen == "not measured: no rail shares a network with one of node 0"


def test_hosts_without_rdma_need_none():
    assert obstacle(name="good_native").seen.startswith("not needed")


def test_a_skipped_check_measures_nothing(cluster_stub, monkeypatch):
    measured = []
    monkeypatch.setattr(link_runs, "with_runs", lambda context: measured.append(context) or context)
    names = cluster_stub.config()["SKIP_CHECKS"]
    cluster_life.look(cluster_stub.config(), None)
    assert measured == []
    cluster_life.look(cluster_stub.config(SKIP_CHECKS=",".join(set(names) - {link_runs.CHECK})), None)
    assert len(measured) == 1
