import pytest


@pytest.fixture(scope="session", autouse=True)
def hosts_can_be_made(need):
    need("root", "namespaces", "ip", "ps", "mount", "ssh", "sshd", "setpriv")
