"""`apportion demo`: a page with a section for each installed domain that has something to show."""

from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

import apportion.domains.demonstration as demonstration
from apportion.cli.demo import _plot_shares
from apportion.domains.demonstration import MULTI, PRIORITISED, SINGLE
from apportion.domains.domain import Demonstration, domain_names, find_domain
from apportion.domains.probes import ShownBest
from apportion.domains.settings import TrainingSettings
from apportion.errors import InputError
from apportion.learners.direct import Direct, DirectEpisodes
from apportion.memory import Replay
from apportion.policy import Recurrent
from apportion.runs.plugins import DOMAINS
from apportion.runs.progress import Progress, Quiet
from cli.command import apportion, assert_refused, one_object
from cli.toy_domain import ToyDomain
from plugins import EXAMPLE, installed

ROW = {"method": "multi-task", "level": 2.0, "low": 1.5, "high": 2.5, "n": 4}
LEVELS = pd.DataFrame([ROW, ROW | {"method": "by <turns>", "level": 1.6}])
SHARES = pd.DataFrame({"Ann": [0.25, 0.5], "Bob": [0.75, 0.5]})


class ShownDomain(ToyDomain):
    """A plug-in of a user's own with a demonstration."""

    name = "shown"

    def demonstrate(self, seed: int, progress: Progress) -> Demonstration:
        progress.stage("playing", 0.5)
        title = "A toy among friends"
        return Demonstration(title, "Who plays?", "games", LEVELS, SHARES, (f"seed {seed}",))


class NeedyDomain(ToyDomain):
    name = "needy"

    def demonstrate(self, seed: int, progress: Progress) -> Demonstration:
        raise InputError("toys need a shop: pip install shop")


SHOWN, NEEDY = ShownDomain(), NeedyDomain()


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """Two plug-ins and no other domain."""
    names = {"shown": f"{__name__}:SHOWN", "needy": f"{__name__}:NEEDY"}
    for name in domain_names():
        monkeypatch.setattr(type(find_domain(name)), "demonstrate", lambda *_: None)
    with installed(tmp_path / "site", {DOMAINS: names}, EXAMPLE):
        yield


def test_a_plug_in_of_a_users_own_is_on_the_page(plugins, tmp_path):
    folder = tmp_path / "demo"
    printed = one_object(apportion("demo", "--out", folder, "--seed", 3, "--json", "--quiet"))
    page = Path(printed["report"]).read_text()
    assert Path(printed["report"]) == folder / "index.html"
    for words in ("A toy among friends", "Who plays?", "by &lt;turns&gt;", "seed 3", "pip install"):
        assert words in page
    # A second call replaces the page of the first, and nothing else that is in the folder.
    again = apportion("demo", "--out", folder, "--quiet")
    assert again.stdout == f"wrote {folder / 'index.html'}\n"
    (folder / "mine.txt").touch()
    assert_refused(apportion("demo", "--out", folder), "contains other files, such as mine.txt")


def test_days_are_shown_without_their_midnight(monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    _plot_shares(SHARES.set_index(pd.DatetimeIndex(["2019-01-02 00:00", "2019-01-03 12:00"])))
    ticks = [label.get_text() for label in drawn[0].axes[0].get_xticklabels()]
    assert ticks == ["2019-01-02", "2019-01-03 12:00"]


@pytest.mark.parametrize(
    ("learner", "replay"),
    [(Direct(8, 0.05), Replay(warm_up=8)), (DirectEpisodes(2, 0.05), Replay(act_periods=0))],
)
def test_each_method_trains_as_many_policies_as_the_page_says(monkeypatch, learner, replay):
    monkeypatch.setattr(demonstration, "UPDATES", 20)
    problem = ShownBest(universe=16)
    universes = np.split(np.arange(16), 2)
    network, training = (lambda key: Recurrent(1, 4, key=key)), TrainingSettings(tasks=4)
    trained = []

    def train_methods(problem, tasks, *others, train=demonstration.train_methods, **options):
        trained.append((tasks, train(problem, tasks, *others, **options)))
        return trained[0][1]

    monkeypatch.setattr(demonstration, "train_methods", train_methods)
    rewards, shares, unseen = demonstration.compare_methods(
        problem,
        problem,
        universes,
        network,
        learner,
        training,
        task_size=3,
        held_out=4,
        tested=2,
        rule="equal",
        replay=replay,
        progress=Quiet(),
    )
    tasks, policies = trained[0]
    assert jax.tree.leaves(policies)[0].shape[:2] == (2, 2 + demonstration.SINGLE_TASKS)
    assert [*rewards] == [SINGLE, MULTI, PRIORITISED, "equal"]
    assert all(table.shape == (2, problem.horizon) for table in rewards.values())
    assert rewards["equal"].mean() == pytest.approx(1 / 3)
    assert rewards[MULTI].mean() > 0.4
    assert shares.sum(1) == pytest.approx(1)
    seen, held_out = (set(np.asarray(stack.members).ravel().tolist()) for stack in (tasks, unseen))
    assert not seen & held_out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["budget", "charging", "federated", "portfolio"])
def test_a_domains_demonstration_has_levels_intervals_and_shares(monkeypatch, name):
    monkeypatch.setattr(demonstration, "UPDATES", 5)
    shown = find_domain(name).demonstrate(0, Quiet())
    assert shown is not None
    levels = shown.levels
    assert {SINGLE, MULTI, PRIORITISED} <= set(levels.method) or "shipped policy" in set(
        levels.method
    )
    assert np.isfinite(levels[["level", "low", "high"]].to_numpy()).all()
    assert ((levels.low <= levels.level) & (levels.level <= levels.high) & (levels.n > 1)).all()
    assert shown.shares.to_numpy().sum(1) == pytest.approx(1, abs=1e-5)
