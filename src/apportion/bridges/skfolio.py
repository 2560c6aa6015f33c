"""Multi-task allocation policy as a skfolio optimiser.

`fit` trains one policy on many subsets of the assets (Algorithm 1) and computes `weights_`, the allocation
for the period after the last row. The trained policy applies to any set of assets.
"""

import warnings
from dataclasses import fields
from typing import Any, cast

import numpy as np
import pandas as pd

from apportion.domains.portfolio.allocation import next_allocation
from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import train_portfolio
from apportion.domains.settings import Method
from apportion.errors import InputError, optional_import
from apportion.policy import Policy

with optional_import("MultiTaskPortfolio needs skfolio", "market"):
    from skfolio.optimization import BaseOptimization
    from skfolio.portfolio import Portfolio
    from sklearn.utils.validation import check_array, check_is_fitted, validate_data

_NUMBERS: dict[str, Any] = {"dtype": np.float64}
_NEAR_EQUAL_FRACTION = 0.02
"""`fit` warns if all weights differ from 1/n by less than this fraction of 1/n."""
_SETTINGS = {field.name for field in fields(PortfolioSettings)}


class MultiTaskPortfolio(BaseOptimization):
    """Multi-task allocation policy.

    `fit` trains one recurrent policy on many subsets of the assets and allocates for the next period. The
    estimator follows the conventions of scikit-learn and skfolio.

    Parameters
    ----------
    policy : Policy, optional
        A trained policy, such as `policy_` of another estimator. `fit` then only computes the weights,
        which makes daily walk-forwards cheap, and other training parameters must keep their defaults. By
        default `fit` trains a policy.
    method : {"pmtl", "mtl", "stl"}
        Prioritised multi-task learning, multi-task learning with uniform sampling, or single-task learning.
    tasks : int
        Number of tasks.
    task_size : int
        Assets per task, at most the number of assets.
    steps : int
        Updates of each policy.
    members : int
        Number of policies in the ensemble.
    trust : float
        Weight of the learned allocation against equal shares, from 0 to 1.
    trade_fraction : float
        Fraction of the way to the target that is traded in each period, from 0 to 1.
    tracking_error_weight : float
        Weight of the penalty on the squared difference of log growth from equal shares.
    window : int
        Periods of history that the policy observes.
    batch : int
        Consecutive periods per batch, at most the number of periods.
    hidden : int
        Units of the recurrent network.
    learning_rate : float
        Step size of Adam.
    cost : float
        Commission in training, a fraction of the value traded.
    seed : int
        Seed of tasks, initial parameters and batches.
    portfolio_params : dict, optional
        Parameters of the portfolio that `predict` returns.
    fallback, raise_on_failure
        As in every skfolio optimiser.
    previous_weights : array-like, optional
        Shares held before the allocation; equal by default. skfolio's walk-forward passes them on from
        fold to fold.

    Attributes
    ----------
    policy_ : Policy
        The trained policy, which applies to any set of assets.
    weights_ : array of shape (n_assets,)
        Allocation of the fitted assets for the period after the last row of `X`.
    deviation_from_equal_ : float
        Largest distance of a weight from 1/n; `fit` warns if it is below 2 % of 1/n.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(0, 0.01, (80, 4))
    >>> model = MultiTaskPortfolio(
    ...     tasks=3, task_size=3, steps=4, members=1, window=8, batch=16, hidden=4)
    >>> model.fit(X).weights_.shape
    (4,)
    >>> model.predict(X[-20:]).n_observations
    20
    """

    policy_: Policy

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        method: Method = "pmtl",
        tasks: int = 30,
        task_size: int = 10,
        steps: int = 6000,
        members: int = 4,
        trust: float = 0.5,
        trade_fraction: float = 0.1,
        tracking_error_weight: float = 15.0,
        window: int = 31,
        batch: int = 109,
        hidden: int = 25,
        learning_rate: float = 2.8e-4,
        cost: float = 0.0025,
        seed: int = 0,
        portfolio_params: dict | None = None,
        fallback=None,
        previous_weights=None,
        raise_on_failure: bool = True,
    ):
        super().__init__(
            portfolio_params=portfolio_params,
            fallback=fallback,
            previous_weights=previous_weights,
            raise_on_failure=raise_on_failure,
        )
        self.policy = policy
        self.method: Method = method
        self.tasks = tasks
        self.task_size = task_size
        self.steps = steps
        self.members = members
        self.trust = trust
        self.trade_fraction = trade_fraction
        self.tracking_error_weight = tracking_error_weight
        self.window = window
        self.batch = batch
        self.hidden = hidden
        self.learning_rate = learning_rate
        self.cost = cost
        self.seed = seed

    def fit(self, X: Any, y: None = None) -> "MultiTaskPortfolio":
        """Train a policy, unless one is given, and compute the next allocation.

        Parameters
        ----------
        X : array-like of shape (n_observations, n_assets)
            Simple returns of the assets; `prices_to_returns` of skfolio computes them from prices.
        y : None
            Not used, present for API consistency.

        Returns
        -------
        MultiTaskPortfolio
            The fitted estimator.

        Raises
        ------
        InputError
            If `X` does not contain returns of at least two assets, or parameters contradict each other.
        """
        prices = self._prices(np.asarray(validate_data(self, X, **_NUMBERS)), X)
        held = None
        if self.previous_weights is not None:
            weights = self._clean_previous_weights(self.n_features_in_)
            if (weights < 0).any() or not np.isfinite(weights).all():
                raise InputError(
                    "previous_weights: short positions are not supported; give shares >= 0"
                )
            held = weights / weights.sum() if weights.sum() > 0 else None
        if self.policy is None:
            days, assets = prices.close.shape
            parameters = self.get_params(deep=False)
            given = {name: parameters[name] for name in _SETTINGS & parameters.keys()}
            given["task_size"] = min(self.task_size, assets)
            given["batch"] = max(1, min(self.batch, days - self.window))
            self.policy_ = train_portfolio(prices, PortfolioSettings(**given)).policy
        else:
            self._refuse_ignored()
            self.policy_ = self.policy
        self.weights_ = self._decide(prices, held)
        equal = 1 / len(self.weights_)
        self.deviation_from_equal_ = float(np.abs(self.weights_ - equal).max())
        if self.deviation_from_equal_ < _NEAR_EQUAL_FRACTION * equal:
            warnings.warn(
                "MultiTaskPortfolio: the weights are nearly 1/n (see deviation_from_equal_); raise trust "
                "or trade_fraction, lower tracking_error_weight, or train for more steps",
                stacklevel=3,
            )
        return self

    def predict(self, X: Any) -> Portfolio:
        """Return the portfolio of the fitted assets over the rows of `X`, with `weights_` on all rows.

        Parameters
        ----------
        X : array-like of shape (n_observations, n_assets)
            Simple returns of the fitted assets. For other assets, use `allocate`.

        Returns
        -------
        Portfolio
            The predicted portfolio.
        """
        check_array(X, **_NUMBERS)
        return cast(Portfolio, super().predict(X))

    def allocate(self, X: Any, held: Any = None) -> np.ndarray:
        """Return the allocation for the period after the last row of `X`.

        Parameters
        ----------
        X : array-like of shape (n_observations, n_assets)
            Simple returns of any assets, at least `window` - 1 rows.
        held : array-like, optional
            Current shares; equal by default.

        Returns
        -------
        array of shape (n_assets,)
            The allocation.
        """
        check_is_fitted(self, "policy_")
        values = check_array(X, **_NUMBERS)
        return self._decide(self._prices(values, X), None if held is None else np.asarray(held))

    @property
    def needs_previous_weights(self) -> bool:
        """Whether allocations depend on the current shares (True)."""
        return True

    def _decide(self, prices: Prices, held: np.ndarray | None) -> np.ndarray:
        decided = next_allocation(self.policy_, prices, window=self.window, held=held)
        decided = np.maximum(decided.astype(float), 0.0)
        return decided / decided.sum()

    def _refuse_ignored(self) -> None:
        """Raise InputError for training parameters that have no effect with a trained policy."""
        defaults = MultiTaskPortfolio().get_params(deep=False)
        trained = _SETTINGS - {"window"}
        given = self.get_params(deep=False).items()
        ignored = [name for name, value in given if name in trained and value != defaults[name]]
        if ignored:
            raise InputError(
                f"MultiTaskPortfolio: {', '.join(ignored)} would have no effect, because policy= is "
                "already trained; keep the defaults, or leave out policy="
            )

    def _prices(self, values: np.ndarray, X: Any) -> Prices:
        """Convert returns to prices that end at 1, which keeps the last ones in the range of float32."""
        if values.shape[1] < 2:
            raise InputError("X: 1 feature(s), a single asset; give at least 2 assets")
        # Returns are never all positive with a median above 20 %.
        if len(values) > 1 and values.min() > 0 and np.median(values) > 0.2:
            raise InputError(
                f"X: all values are positive with median {np.median(values):.4g}, as prices are; give "
                "returns, such as skfolio.preprocessing.prices_to_returns(X)"
            )
        bad = np.argwhere(values <= -1)
        if len(bad):
            row, column = bad[0]
            raise InputError(
                f"X: row {row}, column {column} is {values[row, column]:g}; returns must be above -1"
            )
        values = np.vstack([np.ones(values.shape[1]), np.cumprod(1 + values, axis=0)])
        values = values / values[-1]
        names = X.columns if isinstance(X, pd.DataFrame) else range(values.shape[1])
        days = np.arange(len(values)).astype("datetime64[D]")
        return Prices(days, tuple(str(name) for name in names), values)
