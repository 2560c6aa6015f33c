from pathlib import Path

import pytest

from apportion.domains.portfolio.simulated import SimulatedMarket


@pytest.fixture(scope="session")
def prices(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prices") / "prices.csv"
    SimulatedMarket.draw(universe=6, days=150).prices.to_frame().to_csv(path)
    return path
