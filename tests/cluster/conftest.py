import pytest

from tests.cluster.processes import Hosts


@pytest.fixture
def hosts():
    hosts = Hosts()
    yield hosts
    hosts.close()


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "secret"
    file.write_text("a secret of these tests alone\n")
    return file
