"""A finished run for the tests of servers and garage loops."""

import pytest


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A finished run of an untrained policy, with the site of `served` in the parent folder."""
    from garage_loop import make_run
    from served import SITE

    folder = tmp_path_factory.mktemp("serve")
    (folder / "site.toml").write_text(SITE.to_toml())
    return make_run(folder)
