"""The real server, started as a user starts it."""

from pathlib import Path

import pytest
from launching import MODEL, Launch, free_port
from openai import OpenAI

from launcher import canary


@pytest.fixture
def launch(tmp_path):
    """A new launch per test; what it leaves running is ended whatever happens."""
    made = []

    def make(*flags: str) -> Launch:
        made.append(Launch(free_port(), tmp_path / f"run{len(made)}", tuple(map(str, flags))))
        return made[-1]

    yield make
    for one in made:
        one.run("stop")
        assert one.leaves_nothing()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """One detached server for the tests that only ask it something."""
    one = Launch(free_port(), tmp_path_factory.mktemp("server") / "run")
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
