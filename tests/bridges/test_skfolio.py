"""MultiTaskPortfolio among skfolio's and scikit-learn's own tools, on the embedded stocks."""

import warnings

import jax
import numpy as np
import pytest
from skfolio import Portfolio, RatioMeasure
from skfolio.datasets import load_sp500_dataset
from skfolio.model_selection import WalkForward, cross_val_predict
from skfolio.optimization import EqualWeighted, InverseVolatility, MeanRisk
from skfolio.pre_selection import SelectKExtremes
from skfolio.preprocessing import prices_to_returns
from sklearn import set_config
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.utils.estimator_checks import check_estimator

from apportion.bridges.skfolio import MultiTaskPortfolio
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import compose, untrained_policies
from apportion.errors import InputError

SMALL = {
    "tasks": 3, "task_size": 4, "steps": 6, "members": 1, "window": 6, "batch": 16, "hidden": 4,
    "learning_rate": 0.05, "tracking_error_weight": 0.0, "trust": 1.0, "trade_fraction": 1.0,
}  # fmt: skip


def some_policy(trade_fraction=1.0):
    """An untrained policy with a strong opinion: what it decides depends on what it sees."""
    settings = PortfolioSettings(members=1, hidden=4, trust=1.0, trade_fraction=trade_fraction)
    keys = jax.random.split(jax.random.key(0), 1)
    policy = compose(untrained_policies(1, settings, keys), settings)
    return jax.tree.map(lambda leaf: 30 * leaf if leaf.shape == (1, 4) else leaf, policy)


@pytest.fixture(scope="module")
def prices():
    return load_sp500_dataset().iloc[-400:]


@pytest.fixture(scope="module")
def returns(prices):
    return prices_to_returns(prices)


@pytest.fixture(scope="module")
def trained(returns):
    return MultiTaskPortfolio(**SMALL).fit(returns.iloc[:200])


def test_fitting_gives_shares_of_the_assets(trained, returns):
    assert trained.weights_.shape == (20,)
    assert (trained.weights_ >= 0).all()
    assert trained.weights_.sum() == pytest.approx(1)
    assert np.ptp(trained.weights_) > 1e-6
    portfolio = trained.predict(returns.iloc[200:])
    assert isinstance(portfolio, Portfolio)
    expected = returns.iloc[200:].to_numpy() @ trained.weights_
    np.testing.assert_allclose(portfolio.returns, expected, rtol=1e-6)


def test_weights_near_equal_shares_are_measured_and_warned_of(trained, returns):
    distance = np.abs(trained.weights_ - 1 / 20).max()
    assert trained.deviation_from_equal_ == pytest.approx(distance)
    timid = MultiTaskPortfolio(policy=some_policy(trade_fraction=0.001), window=6)
    with pytest.warns(UserWarning, match=r"nearly 1/n .*raise trust or trade_fraction"):
        timid.fit(returns)
    assert timid.deviation_from_equal_ < 0.02 / 20
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MultiTaskPortfolio(policy=some_policy(), window=6).fit(returns)


def test_weights_see_no_later_rows_and_no_order_of_the_assets(returns):
    model = MultiTaskPortfolio(policy=some_policy(), window=6)
    before = model.fit(returns.iloc[:200]).weights_
    changed = returns.copy()
    changed.iloc[200:] = 0.5
    np.testing.assert_array_equal(before, model.fit(changed.iloc[:200]).weights_)
    assert np.abs(before - model.fit(changed.iloc[:201]).weights_).max() > 1e-6
    order = np.random.default_rng(0).permutation(20)
    moved = model.fit(returns.iloc[:200, order]).weights_
    np.testing.assert_allclose(moved, before[order], atol=1e-6)


def test_what_is_held_enters_the_decision(returns):
    held = {returns.columns[0]: 0.6, returns.columns[1]: 0.4}
    lazy = MultiTaskPortfolio(policy=some_policy(trade_fraction=0.1), window=6)
    free = lazy.fit(returns).weights_
    bound = lazy.set_params(previous_weights=held).fit(returns).weights_
    assert lazy.needs_previous_weights
    assert bound[0] > 0.5
    assert free[0] < 0.2


def test_what_cannot_be_used_is_refused_in_one_sentence(returns):
    for change, message in (
        ({"method": "ppo"}, "choose one of pmtl, mtl, stl"),
        ({"previous_weights": -0.1}, "shares >= 0"),
        ({"window": 500}, "give more days"),
        ({"hidden": "a"}, "hidden is 'a'; it must be of type int"),
        ({"task_size": 1}, "task_size is 1; it must be at least 2"),
    ):
        with pytest.raises(InputError, match=message):
            MultiTaskPortfolio(**(SMALL | change)).fit(returns.iloc[:60])
    model = MultiTaskPortfolio(policy=some_policy(), window=6)
    for X, message in (
        (np.full((60, 5), -1.0), "column 0 is -1; returns must be above -1"),
        (returns.iloc[:, :1], "a single asset; give at least 2"),
        (100 * (1 + returns).cumprod(), "as prices are; give returns, such as .*prices_to_returns"),
    ):
        with pytest.raises(InputError, match=message):
            model.fit(X)
    broken = jax.tree.map(lambda leaf: leaf * np.inf, some_policy())
    with pytest.raises(InputError, match="allocation has numbers that are not finite"):
        MultiTaskPortfolio(policy=broken, window=6).fit(returns)
    ignored = MultiTaskPortfolio(policy=some_policy(), window=6, seed=2, trust=0.3)
    with pytest.raises(InputError, match="seed, trust would have no effect, because policy="):
        ignored.fit(returns)


def test_skfolios_walk_forward_runs_it_beside_its_own_optimisers(returns):
    models = [
        ("multi-task", MultiTaskPortfolio(policy=some_policy(), window=6)),
        ("equal", EqualWeighted()),
        ("inverse volatility", InverseVolatility()),
        ("minimum variance", MeanRisk()),
    ]
    population = cross_val_predict(models, returns, cv=WalkForward(train_size=150, test_size=100))
    assert [path.name for path in population] == [name for name, _ in models]
    assert {path.n_observations for path in population} == {200}
    folds = population[0].portfolios
    np.testing.assert_allclose(folds[1].previous_weights, folds[0].ending_weights, rtol=1e-6)
    assert np.isfinite(population.measures(RatioMeasure.SHARPE_RATIO)).all()


def test_it_ends_a_pipeline_and_takes_part_in_a_search(returns):
    set_config(transform_output="pandas")
    try:
        model = Pipeline(
            [("select", SelectKExtremes(k=6)), ("share", MultiTaskPortfolio(window=6))]
        )
        model.set_params(share__policy=some_policy())
        search = GridSearchCV(
            model, {"share__window": [6, 9]}, cv=WalkForward(train_size=100, test_size=100)
        ).fit(returns)
    finally:
        set_config(transform_output="default")
    assert search.best_params_["share__window"] in (6, 9)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.best_estimator_.predict(returns).weights.shape == (6,)


class ScaledPortfolio(MultiTaskPortfolio):
    """Reads returns in thousandths: scikit-learn's made-up data has returns below -1, and beyond 100."""

    def _prices(self, values, X):
        return super()._prices(values / 1000, X)


NOT_APPLICABLE = {
    "check_fit_score_takes_y": "fit_predict of skfolio's optimisers takes no y",
    "check_methods_sample_order_invariance": "predictions are portfolios, and days have an order",
}


def test_scikit_learns_checks():
    estimator = ScaledPortfolio(policy=some_policy(), window=2)
    check_estimator(estimator, expected_failed_checks=NOT_APPLICABLE, on_skip=None)
