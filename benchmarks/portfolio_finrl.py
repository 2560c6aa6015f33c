"""Days a second of FinRL's portfolio environment, for `portfolio.py`: run by an environment that has it."""

import importlib.metadata
import runpy
import time
from pathlib import Path

import numpy as np
import pandas as pd

STOCKS, DAYS = 10, 250
INDICATORS = ["macd", "rsi_30", "cci_30", "dx_30"]


def environment():
    """The class from its file: importing the package asks for brokers' libraries."""
    package = importlib.metadata.distribution("finrl").locate_file("finrl")
    file = Path(str(package)) / "meta" / "env_portfolio_allocation" / "env_portfolio.py"
    return runpy.run_path(str(file))["StockPortfolioEnv"]


def main() -> None:
    rng = np.random.default_rng(0)
    closes = np.exp(0.01 * rng.normal(size=(DAYS + 2, STOCKS)).cumsum(0))
    frames = []
    for day, row in enumerate(closes):
        columns = {"date": str(day), "tic": [f"s{i}" for i in range(STOCKS)], "close": row}
        columns |= {name: rng.normal(size=STOCKS) for name in INDICATORS}
        columns["cov_list"] = [np.eye(STOCKS)] * STOCKS
        frames.append(pd.DataFrame(columns, index=[day] * STOCKS))
    env = environment()(
        df=pd.concat(frames),
        stock_dim=STOCKS,
        hmax=100,
        initial_amount=1_000_000,
        transaction_cost_pct=0.0025,
        reward_scaling=1.0,
        state_space=STOCKS,
        action_space=STOCKS,
        tech_indicator_list=INDICATORS,
    )
    env.reset()
    actions = rng.uniform(size=(DAYS, STOCKS))
    start = time.perf_counter()
    for action in actions:
        env.step(action)
    print(DAYS / (time.perf_counter() - start))


if __name__ == "__main__":
    main()
