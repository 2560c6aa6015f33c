"""A learned policy in skfolio's walk-forward, compared with skfolio's optimisers.

The 20 embedded stocks, 2014 to 2019. The policy is trained once on earlier years and decides every week
from the last month of prices; skfolio refits its optimisers on the same days.
"""

import pandas as pd
from skfolio.datasets import load_sp500_dataset
from skfolio.model_selection import WalkForward, cross_val_predict
from skfolio.optimization import EqualWeighted, InverseVolatility, MeanRisk
from skfolio.preprocessing import prices_to_returns

from apportion.bridges.skfolio import MultiTaskPortfolio

STEPS = 300  # the default is 6,000
returns = prices_to_returns(load_sp500_dataset())
past, years = returns.loc["2008":"2013"], returns.loc["2013-01":"2019"]

# One policy, trained over subsets of 8 of the first 15 stocks; it then serves all 20.
trained = MultiTaskPortfolio(task_size=8, steps=STEPS, members=2, window=21, batch=64)
trained.fit(past.iloc[:, :15])
print("never trained on:", ", ".join(past.columns[15:]))

models = [
    ("multi-task", MultiTaskPortfolio(policy=trained.policy_, window=21)),
    ("equal", EqualWeighted()),
    ("inverse volatility", InverseVolatility()),
    ("minimum variance", MeanRisk()),
]
# Weights drift between the weekly decisions, and every trade costs 25 basis points.
population = cross_val_predict(
    models,
    years,
    cv=WalkForward(train_size=252, test_size=5),
    portfolio_params={"weight_drift": True},
)

rows = {}
for path in population:
    turnover = sum(
        abs(new.weights - old.ending_weights).sum()
        for old, new in zip(path.portfolios[:-1], path.portfolios[1:], strict=True)
    )
    growth = (1 + pd.Series(path.returns)).prod() * (1 - 0.0025) ** turnover
    span = path.n_observations / 252
    rows[path.name] = {
        "a year, net": f"{growth ** (1 / span) - 1:.1%}",
        "volatility": f"{path.annualized_standard_deviation:.1%}",
        "Sharpe, gross": f"{path.annualized_sharpe_ratio:.2f}",
        "turnover a year": f"{turnover / span:.1f}",
    }
print(pd.DataFrame(rows).T.to_string())
print("The 20 stocks survived until 2022, which flatters every strategy.")
