"""Peers: where they are required, a test that skips fails."""

from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("is_peer", [False, True])
def test_a_required_peer_that_is_not_there_is_a_failure(request, monkeypatch, required, is_peer):
    place = str(Path(__file__).parents[1] / "conftest.py")
    plugins = request.config.pluginmanager.get_plugins()
    [own] = [plugin for plugin in plugins if getattr(plugin, "__file__", None) == place]
    monkeypatch.setenv("PEERS", "required" if required else "")
    item = SimpleNamespace(nodeid="test_x", get_closest_marker=lambda name: is_peer)
    hook = own.pytest_runtest_makereport(item, None)
    next(hook)
    skipped = SimpleNamespace(skipped=True, outcome="skipped", longrepr=("file", 1, "no byzfl"))
    with pytest.raises(StopIteration) as end:
        hook.send(skipped)
    assert end.value.value is skipped
    if required and is_peer:
        assert skipped.outcome == "failed"
        assert skipped.longrepr == "test_x: PEERS=required, but no byzfl"
    else:
        assert skipped.outcome == "skipped"
