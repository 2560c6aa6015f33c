"""The policy as a skfolio optimiser: fit on past returns, predict a portfolio.

Fitting trains one policy over many subsets of the assets (Algorithm 1) and decides `weights_`, the
allocation of the period after the last row. A trained policy serves any set of assets.
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
"""`fit` warns if all weights differ from 1/n by less than this fraction of it."""
_SETTINGS = {field.name for field in fields(PortfolioSettings)}


class MultiTaskPortfolio(BaseOptimization):
    """A multi-task allocation policy with scikit-learn's and skfolio's manners.

    Parameters
    ----------
    policy
        A trained policy (another estimator's `policy_`) to use as it is: `fit` then trains nothing
        and only decides, which makes daily walk-forwards cheap; settings of training would then do
        nothing, and are refused. With None, `fit` trains.
    method, tasks, task_size, steps, members, window, batch, hidden, learning_rate
        As in `PortfolioSettings`. Tasks are as large as the assets allow, `task_size` at most, and
        a batch as long as the periods allow, `batch` at most.
    trust, trade_fraction, tracking_error_weight
        The same: how far the policy is followed, how fast, and how far it may stray from equal shares.
    cost
        Commission the policy is trained with, a fraction of the value traded.
    seed
        Decides tasks, first parameters and batches: the same seed gives the same weights.
    portfolio_params, fallback, previous_weights, raise_on_failure
        As in every skfolio optimiser. `previous_weights` are the shares held when the decision is
        made, equal ones by default; skfolio's walk-forward hands them from fold to fold.

    Attributes
    ----------
    policy_
        The trained policy, for any set of assets.
    weights_
        Its allocation among the fitted assets for the period after the last row of `X`.
    deviation_from_equal_ : float
        Largest distance of a weight from 1/n; `fit` warns if it is below a fiftieth of 1/n.

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
        """Train on the rows of `X` (or take the policy given) and decide the next allocation.

        Parameters
        ----------
        X
            Simple returns, as everywhere in skfolio (`prices_to_returns` makes them of prices): a row a
            period and a column an asset; columns named by strings keep their names.
        y
            Not used; scikit-learn hands it over.
        """
        prices = self._prices(np.asarray(validate_data(self, X, **_NUMBERS)), X)
        held = None
        if self.previous_weights is not None:
            weights = self._clean_previous_weights(self.n_features_in_)
            if (weights < 0).any() or not np.isfinite(weights).all():
                raise InputError(
                    "previous_weights: the policy holds no short positions; give shares >= 0"
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
        """The portfolio over the rows of `X`.

        For the fitted assets `weights_` apply to all of them, as in every skfolio optimiser. For
        other assets the first `window` - 1 rows are the history from which their shares are decided,
        and the portfolio covers the rows after them.
        """
        check_is_fitted(self, "weights_")
        values = check_array(X, **_NUMBERS)
        names = getattr(self, "feature_names_in_", None)
        if isinstance(X, pd.DataFrame) and names is not None:
            fitted = list(X.columns) == list(names)
        else:
            fitted = values.shape[1] == self.n_features_in_
        if fitted:
            return cast(Portfolio, super().predict(X))
        rows = self.window - 1
        if len(values) <= rows:
            raise InputError(
                f"X: {len(values)} rows of assets that were not fitted; their shares are decided "
                f"from the first {rows}, so give more"
            )
        cut = X.iloc if isinstance(X, pd.DataFrame) else np.asarray(X)
        parameters: dict[str, Any] = {"name": type(self).__name__} | (self.portfolio_params or {})
        return Portfolio(X=cut[rows:], weights=self.allocate(cut[:rows]), **parameters)

    def allocate(self, X: Any, held: Any = None) -> np.ndarray:
        """The allocation for the period after the last row of `X`, whatever its assets are.

        Parameters
        ----------
        X
            Returns of any assets, at least `window` - 1 rows.
        held
            Shares held now; equal ones by default.
        """
        check_is_fitted(self, "policy_")
        values = check_array(X, **_NUMBERS)
        return self._decide(self._prices(values, X), None if held is None else np.asarray(held))

    @property
    def needs_previous_weights(self) -> bool:
        """True: a decision starts from what is held."""
        return True

    def _decide(self, prices: Prices, held: np.ndarray | None) -> np.ndarray:
        decided = next_allocation(self.policy_, prices, window=self.window, held=held)
        decided = np.maximum(np.asarray(decided, float), 0.0)
        return decided / decided.sum()

    def _refuse_ignored(self) -> None:
        """Refuse what a trained policy makes meaningless: a search over it finds nothing."""
        defaults = MultiTaskPortfolio().get_params(deep=False)
        trained = _SETTINGS - {"window"}
        given = self.get_params(deep=False).items()
        ignored = [name for name, value in given if name in trained and value != defaults[name]]
        if ignored:
            raise InputError(
                f"MultiTaskPortfolio: {', '.join(ignored)} would do nothing beside policy=, which is used "
                "as it is trained; leave out what differs from its default, or policy="
            )

    def _prices(self, values: np.ndarray, X: Any) -> Prices:
        """Prices that have these returns and end at 1, which keeps the last ones in float32's range."""
        if values.shape[1] < 2:
            raise InputError(
                "X: 1 feature(s), one asset alone; at least 2 are needed to share anything out"
            )
        # No returns are positive throughout and half of them above a fifth.
        if len(values) > 1 and values.min() > 0 and np.median(values) > 0.2:
            raise InputError(
                f"X: all values are positive, {np.median(values):.4g} in the middle, as prices are; give "
                "returns, by skfolio.preprocessing.prices_to_returns(X)"
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
