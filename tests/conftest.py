"""What all suites share: tests that the machine cannot run are skipped and told, the others run side by side."""

import fcntl
import functools
import os
import signal
from collections import Counter
from pathlib import Path

import needs
import pytest
from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).parent
MOST_WORKERS = 5
WORKER_BYTES = 5 << 30  # with the engines that its tests start

# Before anything imports torch: threads of several workers that wait for each other on the same cores cost several
# times what one thread of each takes.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))

# A worker takes a file whole, for what its tests share; but these test by test, and these suites whole.
ALONE = ("tests/local/test_local_lifecycle.py",)
TOGETHER = ("tests/local", "tests/image")
# These hold a bar in seconds, which is for an idle machine: they come last, while nothing else runs.
QUIET = (
    "tests/cluster/test_cluster_start.py::test_check_is_quick",
    "tests/cluster/test_cluster_start.py::test_three_nodes_are_prepared_in_three_seconds",
    "tests/host/test_probe.py::test_probe_runs_as_it_is_sent",
    "tests/host/test_start_scripts.py::test_check_lists_every_failure_quickly",
    "tests/host/test_weights_hashing.py::test_it_is_as_fast_as_sha256sum",
    "tests/host/test_weights_verify.py::test_verification_of_a_verified_folder_takes_less_than_two_seconds",
)
# Real servers on several hosts and ranks, ends of all kinds, and images: half of the whole time. They run where they
# are named, by a path or by `-m slow`, and in CI.
SLOW = (
    "tests/cluster/test_cluster_start.py", "tests/image", "tests/local/test_local_lifecycle.py",
    "tests/plugin/test_exl3_engine.py::test_two_ranks_answer_as_one",
    "tests/plugin/test_cpu_overrides.py::test_torchvision_imports_in_vllms_processes",
    "tests/plugin/test_selfcheck.py::test_the_released_vllm_passes",
)  # fmt: skip
WITH_VLLM = ("tests/plugin", "tests/soak", "tests/local", "tests/cluster/test_cluster_start.py")
WITH_SLOW = "EXL3_TESTS_WITH_SLOW"  # told to the workers, which do not see what the user typed
# These take longest, so they begin first: no worker is left alone with one of them at the end.
LONG = (
    "tests/cluster/test_cluster_start.py", "tests/local/test_local_lifecycle.py", "tests/image", "tests/local",
    "tests/plugin/test_exl3_engine.py", "tests/plugin/test_cpu_engine.py", "tests/host/test_weights_sync.py",
    "tests/host/test_cluster_life.py", "tests/soak/test_cpu_soak.py", "tests/plugin/test_cpu_overrides.py",
    "tests/host/test_troubleshooting.py", "tests/tools/test_encoder.py", "tests/host/test_weights_kills.py",
)  # fmt: skip


def pytest_addoption(parser):
    told = "Fail, rather than skip, where the machine lacks what a test needs; for CI."
    parser.addoption("--complete", action="store_true", help=told)


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        is_named = config.args_source is pytest.Config.ArgsSource.ARGS or "slow" in config.option.markexpr
        os.environ[WITH_SLOW] = "1" if is_named else ""
    config.addinivalue_line("markers", "needs(*names): rows of tests/needs.py without which the test cannot run")
    # What a script starts in the background (nohup, &) inherits that Ctrl-C is ignored, and so would every process
    # that a test starts and interrupts.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# What the machine lacks


def pytest_runtest_setup(item):
    require(item.config, *(name for mark in item.iter_markers("needs") for name in mark.args))


@pytest.fixture(scope="session")
def need(pytestconfig):
    """For fixtures: `need("sshd", ...)`, as the mark `needs` for tests."""
    return functools.partial(require, pytestconfig)


def require(config, *names):
    """Skips the test, or fails it where all have to run."""
    if why := needs.reason(*names):
        pytest.fail(why, pytrace=False) if config.getoption("complete") else pytest.skip(why)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """The last line but pytest's own says what did not run, and why."""
    yield
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    told = [f"{count}, {why}" for why, count in reasons.most_common()]
    if not os.environ[WITH_SLOW]:
        told.append("the slow ones, which `tests/run -m slow` runs")
    if told:
        terminalreporter.write_line(f"Not tested: {'; '.join(told)}", yellow=True)


# Side by side


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Workers for `-n auto`; 0 runs the tests in this process: one file, or output that is to be seen (-s)."""
    is_one_file = len(config.args) == 1 and ".py" in config.args[0]
    if is_one_file or config.option.capture == "no" or config.option.collectonly:
        return 0
    free = int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) << 10
    # One more than cores: what waits for another process, a disk or a clock leaves its core to the others.
    workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)) + 1, free // WORKER_BYTES)
    return workers if workers > 1 else 0


class Pieces(LoadScopeScheduling):
    """Gives every worker one piece after the other, in the order of collection."""

    def __init__(self, config, log):
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid):
        return piece(nodeid)


def piece(nodeid):
    if nodeid.startswith(QUIET):
        return "quiet"
    file = nodeid.partition("::")[0]
    return nodeid if file in ALONE else next((suite for suite in TOGETHER if file.startswith(suite)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return Pieces(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item):
    if item.nodeid.startswith(WITH_VLLM):
        item.add_marker(pytest.mark.needs("libnuma.so.1"))
    if item.nodeid.startswith(SLOW):
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if not os.environ[WITH_SLOW]:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("slow")])
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    items.sort(key=lambda item: turn(item.nodeid))


def turn(nodeid):
    place = next((number for number, long in enumerate(LONG) if nodeid.startswith(long)), len(LONG))
    return place if piece(nodeid) != "quiet" else len(LONG) + 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """What is to run while nothing else does waits for the tests of the other workers."""
    with open(__file__) as lock:
        if "PYTEST_XDIST_WORKER" in os.environ:
            fcntl.flock(lock, fcntl.LOCK_EX if piece(item.nodeid) == "quiet" else fcntl.LOCK_SH)
        return (yield)
