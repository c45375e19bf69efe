"""The soak's command without engines: orders, verdicts, exit codes, and what a report needs to say."""

import fcntl
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import bugs
import over_http
import pytest
import run
from arms import Platform, named, plain
from engine import ROOM
from run import FINDINGS, NO_ANSWER, conclude, unexercised

from launcher import soak

H200, CPU = Platform("cuda", 9), Platform("cpu")
ARM = "cache-mtp3-sync-graphs-triton-auto"
FINDING = {"text": "session s1, turn 0, position 3: 2.000 below the best token"}
GOOD = {"turns": 9, "hits": 4, "findings": [], "counts": {"aborts": 2, "hits": 4}, "drafted": 90, "accepted": 40,
        "preemptions": 1}  # fmt: skip


def order(arm=ARM, bug=None):
    return {"arm": arm, "name": f"{bug}.{arm}" if bug else arm, "bug": bug}


def concluded(bug=None, **changes):
    one = order(bug=bug)
    return conclude([one], {one["name"]: GOOD | changes}, is_gpu=True)


def test_an_arm_without_findings_passes():
    assert concluded() == ([f"PASS {ARM}: 9 turns, 4 hits, 0 findings"], 0)


def test_a_finding_fails_and_is_told():
    lines, code = concluded(findings=[FINDING])
    assert code == FINDINGS and lines[0].startswith("FAIL") and FINDING["text"] in lines[1]
    again = concluded(findings=[FINDING], shrunk={"plan": "/w/x.small.json", "sessions": 2})[0][2]
    assert again.endswith(f"with 2 sessions: python3 tests/soak/run.py --arms {ARM} --plan /w/x.small.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"counts": {"aborts": 2, "hits": 0}}, "no prompt hit the prefix cache"), ({"accepted": 0}, "0 of 90 drafted"),
     ({"accepted": 90}, "90 of 90 drafted"), ({"counts": {"aborts": 0, "hits": 4}}, "no request was taken back")],
)  # fmt: skip
def test_silence_about_what_did_not_happen_is_no_pass(changes, words):
    lines, code = concluded(**changes)
    assert code == FINDINGS and words in lines[0]
    assert unexercised(plain("auto").name, GOOD, is_gpu=True) == []


STATES = {"states": 16, "hits": 9, "findings": [], "bars": {}, "largest": {}}


def test_states_count_beside_tokens_and_their_silence_must_mean_something():
    lines, code = concluded(states=STATES)
    assert code == 0 and lines == [f"PASS {ARM}: 9 turns, 4 hits, 0 findings; 16 states, 9 after a hit, 0 findings"]
    finding = {"text": "session s1, after the prompt: KDA recurrent"}
    lines, code = concluded(states=STATES | {"findings": [finding]})
    assert code == FINDINGS and lines[0].endswith("16 states, 9 after a hit, 1 findings")
    assert finding["text"] in lines[1]
    assert "no state was compared after a hit" in concluded(states=STATES | {"hits": 0})[0][0]
    lines, code = concluded(states={"error": "the states could not be read: Unreadable('x')"})
    assert code == FINDINGS and lines[0].startswith("FAIL") and "could not be read" in lines[0]
    assert concluded(bug="other-session", states=STATES | {"findings": [finding]})[1] == 0  # this judge may see it too
    lines, code = concluded(bug="probe-nan-in-new-blocks", states={"error": "the states could not be read: x"})
    assert code == FINDINGS and "could not be read" in lines[0]


def test_a_plan_from_a_file_may_do_less_than_an_arm_is_there_for():
    report = GOOD | {"accepted": 0, "counts": {"aborts": 0, "hits": 0}}
    assert conclude([order() | {"plan": "small.json"}], {ARM: report}, is_gpu=True)[1] == 0
    assert conclude([order()], {ARM: report}, is_gpu=True)[1] == FINDINGS


def test_an_arm_without_a_report_is_no_pass_whatever_others_say():
    other = order("cache-nodrafts-sync-graphs-triton-auto")
    lines, code = conclude([order(), other], {other["name"]: GOOD | {"findings": [FINDING]}}, is_gpu=True)
    assert code == NO_ANSWER and "gave no answer" in lines[0]


@pytest.mark.parametrize(("bug", "found", "code"), [
    ("other-session", [FINDING], 0), ("other-session", [], FINDINGS),
    ("probe-nan-in-new-blocks", [], 0), ("probe-nan-in-new-blocks", [FINDING], FINDINGS),
    ("decode-rows", [], FINDINGS), ("topk-ids", [], 0), ("topk-ids", [FINDING], 0),
])  # fmt: skip
def test_a_planted_bug_must_show_and_a_probe_must_not(bug, found, code):
    assert concluded(bug=bug, findings=found)[1] == code


def test_what_took_no_effect_proves_nothing():
    lines, code = concluded(bug="topk-ids", findings=[], effects=0)
    assert code == FINDINGS and "what was planted never took effect" in lines[0]
    assert concluded(bug="topk-ids", findings=[], effects=9)[1] == 0


def test_the_launcher_knows_how_many_sessions_a_soak_has():
    assert run.arguments([]).sessions == soak.ENOUGH_SESSIONS


def test_no_preemption_is_noted():
    assert concluded(preemptions=0)[0][-1].startswith("NOTE no request was preempted")


# Orders


def orders(tmp_path, platform, *argv):
    args = run.arguments(["--work", str(tmp_path), *argv])
    return run.wanted(args, run.Run(args, platform))


def test_the_plain_arms_come_first_and_once(tmp_path):
    made, lacks = orders(tmp_path, H200)
    assert [one["name"] for one in made[:2]] == [plain(kv).name for kv in (named(made[2]["arm"]).kv, "auto")]
    assert not lacks
    assert [one["plain"] for one in made] == [True, True] + [False] * (len(made) - 2)
    assert json.loads(json.dumps(made)) == made


def test_a_plain_arm_beside_others_is_no_longer_than_a_floor_needs(tmp_path):
    made, _ = orders(tmp_path, H200, "--arms", ARM, "--sessions", "200")
    assert [one["sessions"] for one in made] == [run.PLAIN_SESSIONS, 200]
    alone, _ = orders(tmp_path, CPU, "--sessions", "200")
    assert [one["sessions"] for one in alone] == [200]


def test_each_plan_of_an_arm_is_an_engine_with_a_seed_of_its_own(tmp_path):
    other = "cache-nodrafts-sync-graphs-triton-auto"
    made, _ = orders(tmp_path, H200, "--arms", f"{ARM},{other}", "--plans", "2", "--seed", "5")
    named_ = [(one["name"], one["seed"]) for one in made if not one["plain"]]
    assert named_ == [(ARM, 5), (f"{ARM}@6", 6), (other, 5), (f"{other}@6", 6)]
    assert [one["seed"] for one in made if one["plain"]] == [5]


def test_every_planted_bug_has_its_arm_and_floor(tmp_path):
    made, lacks = orders(tmp_path, H200, "--bugs", "all")
    assert {one["bug"] for one in made} == {None, *bugs.SETS["all"]} and lacks == {}
    guards = orders(tmp_path, H200, "--bugs", "guards")[0]
    assert {one["bug"] for one in guards} == {None, *bugs.SETS["guards"]} and len(bugs.SETS["guards"]) == 7
    assert [one["name"] for one in made if not one["bug"]] == [plain("auto").name]
    assert next(one for one in made if one["bug"] == "chunk-ends")["options"] == {"max_num_batched_tokens": 131}
    assert {one["chunk"] for one in orders(tmp_path, H200)[0]} == {509, 151}
    # A planted arm may have the plain arm's name, but never its say.
    assert not any(one["plain"] for one in made if one["bug"])


def test_what_a_cpu_cannot_plant_is_named(tmp_path):
    made, lacks = orders(tmp_path, CPU, "--bugs", "all")
    assert [one["bug"] for one in made] == [None, "other-state"]
    assert len(lacks) == len(bugs.SETS["all"]) - 1 and all(lacks.values())


def over_http_words(words):
    return over_http.main(["--url", "http://127.0.0.1:9/v1", "--model", ".", *words])


def test_wrong_usage_is_told_and_nothing_starts(tmp_path, capsys):
    assert run.main(["--work", str(tmp_path), "--arms", "fast"]) == run.USAGE
    assert "--arms fast: no such arm" in capsys.readouterr().err
    assert run.main(["--work", str(tmp_path), "--bugs", "mould"]) == run.USAGE
    assert "--bugs 'mould': no such bug; there are chunk-ends" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run.arguments(["--plan", str(tmp_path / "none.json")])
    assert "none.json: no such file" in capsys.readouterr().err
    for text in ("{}", "[", '{"seed": 0, "edges": {}, "sessions": []}'):
        (tmp_path / "odd.json").write_text(text)
        for command in (run.arguments, over_http_words):
            with pytest.raises(SystemExit) as told:
                command(["--plan", str(tmp_path / "odd.json")])
            assert told.value.code == run.USAGE and "odd.json: " in capsys.readouterr().err


def test_two_soaks_do_not_share_a_folder(tmp_path, capsys):
    """They would delete each other's files."""
    (tmp_path / "arm.report.json").write_text("{}")
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run.main(["--work", str(tmp_path)]) == run.USAGE
    assert "another soak works there" in capsys.readouterr().err and (tmp_path / "arm.report.json").exists()


def test_a_folder_that_cannot_be_used_is_told_before_anything_starts(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run.main(["--work", str(tmp_path / "file")]) == run.USAGE
    assert "name another folder" in capsys.readouterr().err
    for report in (tmp_path, tmp_path / "none" / "soak.json"):
        for command in (run.arguments, over_http_words):
            with pytest.raises(SystemExit) as told:
                command(["--report", str(report)])
            assert told.value.code == run.USAGE and "cannot be written" in capsys.readouterr().err


def test_a_vllm_for_gpus_without_a_gpu_is_told(tmp_path, capsys, monkeypatch):
    """It is no soak of the CPU."""
    monkeypatch.setattr(run, "versions", lambda: {"vllm": "0.33.0"})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run.main(["--work", str(tmp_path / "work")]) == run.USAGE
    assert "nvidia-smi names no GPU" in capsys.readouterr().err
    for said in ("", "echo No devices were found", "exit 9"):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{said}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        with pytest.raises(ValueError, match="nvidia-smi names no GPU"):
            run.gpu_platform()
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 12.1\necho 9.0\n")
    assert run.gpu_platform() == Platform("cuda", 12)


def test_a_soak_over_http_without_a_hit_says_so(tmp_path, capsys, monkeypatch):
    for hits, said in ((0, True), (3, False)):

        async def answered(*args, hits=hits, **more):
            return {"turns": 5, "hits": hits, "findings": [], "misshapen": []}

        monkeypatch.setattr(over_http, "soak", answered)
        monkeypatch.setattr(over_http, "Words", lambda model: None)
        assert over_http_words(["--report", str(tmp_path / "report.json")]) == 0
        assert ("NOTE no prompt came from the prefix cache" in capsys.readouterr().out) == said


def test_an_engine_that_cannot_start_is_a_failure_with_its_log(tmp_path, capsys):
    args = run.arguments(["--work", str(tmp_path), "--seconds", "30"])
    one = run.Run(args, CPU)
    assert not one._process("no-such-role", "x", "auto", {})
    assert "x: ended with 1; the end of its log:" in capsys.readouterr().out
    assert "KeyError" in (tmp_path / "x.log").read_text()


# Stands in for engine.py: an engine with a rank that holds its output open and outlives it, if it is let.
STAND_IN = """
import json, subprocess, sys, time
from pathlib import Path
sys.path.append({folder!r})
import groups
groups.end_with_runner()
role, order = sys.argv[1], json.loads(sys.argv[2])
how, work = json.loads(Path({behave!r}).read_text()), Path(order["work"])
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
name = order.get("name", "judge")
(work / (name + ".begun")).write_text(str(rank.pid))
(work / (name + ".begun")).rename(work / (name + ".rank"))
print("is up", flush=True)
how = how.get(name, how.get(role))
if how == "lasts":
    time.sleep(100)
if how == "answers":
    (work / (name + ".report.json")).write_text("{{}}")
while how == "waits" and not (work / "done").exists():
    time.sleep(0.05)
sys.exit(how if isinstance(how, int) else 0)
"""


@pytest.fixture
def behave(tmp_path, monkeypatch):
    """Sets how stand-ins behave, by the names of arms or by roles."""
    stand_in, how = tmp_path / "stand_in.py", tmp_path / "how"
    stand_in.write_text(STAND_IN.format(folder=str(run.HERE), behave=str(how)))
    monkeypatch.setattr(run, "ENGINE", stand_in)
    return lambda **given: how.write_text(json.dumps(given))


def soaked(tmp_path, *names, plain_first=False, **more) -> tuple[run.Run, dict, float]:
    """(the run, its reports, how long it took)."""
    args = run.arguments(["--work", str(tmp_path), "--seconds", "60", "--parallel", "3"])
    one, begin = run.Run(args, CPU), time.monotonic()
    orders = [{"arm": plain("auto").name, "name": name, "bug": None, "work": str(tmp_path),
               "plain": plain_first and not i} for i, name in enumerate(names)]  # fmt: skip
    return one, one.all([order | more for order in orders]), time.monotonic() - begin


def is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def assert_no_rank_is_left(tmp_path, count: int) -> None:
    ranks, end = [int(file.read_text()) for file in tmp_path.glob("*.rank")], time.monotonic() + 5
    while not all(map(is_gone, ranks)) and time.monotonic() < end:
        time.sleep(0.02)
    assert len(ranks) == count and all(map(is_gone, ranks))


def test_ranks_end_with_their_engine(tmp_path, behave):
    """A rank that is left holds the engine's output open: whoever reads that would wait for it."""
    behave(arm="answers", arm2=5, judge="waits")
    _, reports, seconds = soaked(tmp_path, "arm", "arm2")
    assert reports == {"arm": {}} and seconds < 30
    assert_no_rank_is_left(tmp_path, 3)


def test_a_judge_that_ends_early_ends_the_soak(tmp_path, capsys, behave):
    """The arms would answer for minutes and then wait for a verdict that nobody gives."""
    behave(arm="lasts", judge=5)
    one, reports, seconds = soaked(tmp_path, "arm", "arm2", "arm3")
    assert reports == {} and seconds < 30 and not one.running
    said = capsys.readouterr().out
    assert "judge-auto-0: ended with 5" in said and "judge-auto-0: ended early" in said
    assert_no_rank_is_left(tmp_path, len(list(tmp_path.glob("*.rank"))))


def test_an_arm_does_not_wait_for_a_floor_that_does_not_come(tmp_path, capsys, behave):
    behave(arm=5, other="lasts", third="lasts", judge="waits")
    _, reports, seconds = soaked(tmp_path, "arm", "other", "third", plain_first=True)
    assert reports == {} and seconds < 30
    assert "arm: gave no floor" in capsys.readouterr().out and not (tmp_path / "third.rank").exists()
    behave(arm=5, other="answers", judge="waits")
    (tmp_path / "arm.0.verdict.json").touch()  # it failed after the floor was there
    assert soaked(tmp_path, "arm", "other", plain_first=True)[1] == {"other": {}}


def test_an_engine_that_is_late_goes_with_its_ranks(tmp_path, capsys, behave):
    behave(arm="lasts", judge="waits")
    args = run.arguments(["--work", str(tmp_path), "--seconds", "2"])
    one = run.Run(args, CPU)
    assert not one._process("arm", "arm", "auto", {"name": "arm", "work": str(tmp_path)})
    assert "arm: ended with -9 (the time is over)" in capsys.readouterr().out
    assert_no_rank_is_left(tmp_path, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_an_interrupt(tmp_path, behave, number):
    """As Ctrl-C, as the launcher ends what does not listen to it, and as the kernel does without memory."""
    behave(arm="lasts", judge="lasts")
    main = f"""
import runpy, sys
sys.path.insert(0, {str(run.HERE)!r})
import groups
start = groups.start
groups.start = lambda command, *more: start([*command[:2], {str(run.ENGINE)!r}, *command[3:]], *more)
sys.argv = ["run.py", "--work", {str(tmp_path)!r}, "--arms", {plain("auto").name!r}]
runpy.run_path({run.__file__!r}, run_name="__main__")
"""
    process = subprocess.Popen([sys.executable, "-c", main], stdout=subprocess.PIPE, text=True, start_new_session=True)
    while len(list(tmp_path.glob("*.rank"))) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    begin = time.monotonic()
    process.send_signal(number)
    said = process.communicate(timeout=20)[0]
    assert process.returncode == (-number if number == signal.SIGKILL else run.INTERRUPTED)
    assert number == signal.SIGKILL or "every engine was ended" in said
    assert_no_rank_is_left(tmp_path, 2)
    assert time.monotonic() - begin < 5


def test_models_for_long_contexts_are_links_but_for_one_number(tmp_path):
    run.make_models(tmp_path, 9216, Path(run.ROOT) / "models" / "local-drafts")
    for name in ("local", "local-mtp", "local-dflash2"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config.get("text_config", config)["max_position_embeddings"] == 9216 + ROOM  # the judge's
        assert any(file.is_symlink() and file.exists() for file in (tmp_path / name).glob("*.safetensors"))
    config = json.loads((tmp_path / "local-mtp" / "config.json").read_text())
    assert config["text_config"]["num_nextn_predict_layers"] == 1


def test_the_command_explains_itself():
    said = subprocess.run([sys.executable, run.__file__, "--help"], capture_output=True, text=True, check=True).stdout
    words = "".join(said.split())  # names are broken at their hyphens
    assert all(name in words for name in ("--bugs", "pairwise", *bugs.BUGS))
