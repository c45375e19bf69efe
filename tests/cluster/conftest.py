import pytest
from hosts import unavailable


@pytest.fixture(scope="session", autouse=True)
def hosts_can_be_made():
    """Without them these tests fail, also in CI: who cannot run them leaves them out by name (-m "not cluster")."""
    if why := unavailable():
        pytest.fail(f'{why}, or leave these tests out with -m "not cluster"')
