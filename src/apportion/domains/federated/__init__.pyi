from .aggregators import UNIFORM as UNIFORM
from .aggregators import Fixed as Fixed
from .aggregators import run_episodes as run_episodes
from .data import embedded_digits as embedded_digits
from .data import read_digits as read_digits
from .federation import paper_world as paper_world
from .policy import AggregationPolicy as AggregationPolicy
from .settings import reduced_size as reduced_size
