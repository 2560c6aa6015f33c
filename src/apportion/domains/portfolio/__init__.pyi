from .market import Costs as Costs
from .market import Market as Market
from .prices import Prices as Prices
from .prices import embedded_prices as embedded_prices
from .prices import load_prices as load_prices
from .record import Backtest as Backtest
from .simulated import SimulatedMarket as SimulatedMarket
