"""Plug-ins are found by their entry points, and only their packages may name policy classes."""

import sys
from importlib.metadata import EntryPoint

import pytest

from apportion.domains.domain import find_domain
from apportion.errors import InputError
from apportion.runs import plugins
from apportion.runs.plugins import DOMAINS, STUDIES, find_plugins, load_plugin
from plugins import installed


def test_a_domain_of_a_package_that_is_not_installed_names_the_package(monkeypatch):
    own = [point for point in plugins.entry_points(group=DOMAINS) if point.name != "charging"]
    monkeypatch.setattr(plugins, "entry_points", lambda group: own if group == DOMAINS else [])
    find_plugins.cache_clear()
    try:
        with pytest.raises(InputError, match="apportion-charging") as refused:
            find_domain("charging")
        assert "\n" not in str(refused.value)
    finally:
        find_plugins.cache_clear()


def test_two_packages_with_the_same_name_are_refused(monkeypatch):
    points = [EntryPoint("toy", f"{package}:STUDY", STUDIES) for package in ("one", "two")]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    words = r"two installed packages register 'toy' in apportion\.studies: one and two; uninstall"
    with pytest.raises(InputError, match=words):
        find_plugins.__wrapped__(STUDIES)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "No module named 'broken_plugin'"),
        ("import not_installed_anywhere\n", "No module named 'not_installed_anywhere'"),
        ("", "has no attribute 'DOMAIN'"),
    ],
)
def test_a_broken_plugin_is_refused_in_one_sentence(source, reason, tmp_path, monkeypatch):
    if source is not None:
        (tmp_path / "broken_plugin.py").write_text(source)
    monkeypatch.delitem(sys.modules, "broken_plugin", raising=False)
    with (
        installed(tmp_path, {DOMAINS: {"broken": "broken_plugin:DOMAIN"}}),
        pytest.raises(InputError, match=rf"^broken: .*{reason}.*; reinstall toy-package$"),
    ):
        load_plugin(DOMAINS, "broken")
