"""A finished run that servers and loops of all files use."""

import pytest


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run of an untrained policy; the site of `served` is described beside it."""
    from garage_loop import make_run
    from served import SITE

    folder = tmp_path_factory.mktemp("serve")
    (folder / "site.toml").write_text(SITE.to_toml())
    return make_run(folder)
