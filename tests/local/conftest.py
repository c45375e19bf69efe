"""The real server, started as a user starts it."""

import os
from pathlib import Path

import pytest
from launching import MODEL, Launch, new_launch
from openai import OpenAI

from launcher import canary


@pytest.fixture(scope="session")
def caches(tmp_path_factory) -> Path:
    """One folder for all workers of a run."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    run = tmp_path_factory.getbasetemp().parent if is_worker else tmp_path_factory.getbasetemp()
    (run / "caches").mkdir(exist_ok=True)
    return run / "caches"


@pytest.fixture
def launch(tmp_path, caches):
    """A new launch per test; what it leaves running is ended whatever happens."""
    made = []

    def make(*flags: str) -> Launch:
        made.append(new_launch(tmp_path / f"run{len(made)}", caches, *map(str, flags)))
        return made[-1]

    yield make
    for one in made:
        one.run("stop")
        assert one.leaves_nothing()


@pytest.fixture(scope="session")
def server(tmp_path_factory, caches):
    """One detached server for the tests that only ask it something."""
    one = new_launch(tmp_path_factory.mktemp("server") / "run", caches)
    started = one.run("start", "--detach")
    try:
        assert started.returncode == 0, started.stderr
        yield one
    finally:
        stopped = one.run("stop")
    assert stopped.returncode == 0 and one.leaves_nothing()


@pytest.fixture(scope="session")
def client(server) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def questions() -> list[canary.Question]:
    return canary.read_questions(MODEL / "canary.json")


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("local")
