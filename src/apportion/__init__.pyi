from .certify.certificate import Gains as Gains
from .learners.direct import Direct as Direct
from .learners.direct import DirectEpisodes as DirectEpisodes
from .learners.ppo import PPO as PPO
from .memory import Replay as Replay
from .policy import Policy as Policy
from .policy import Pooled as Pooled
from .policy import Recurrent as Recurrent
from .policy import assert_equivariant as assert_equivariant
from .priority import Priority as Priority
from .problem import Observation as Observation
from .problem import Problem as Problem
from .problem import Step as Step
from .runs.checkpoint import save_state as save_state
from .runs.export import export_policy as export_policy
from .runs.folder import load_run as load_run
from .runs.policy_file import load_policy as load_policy
from .runs.policy_file import save_policy as save_policy
from .tasks import Task as Task
from .tasks import draw_tasks as draw_tasks
from .tasks import split_entities as split_entities
from .training import Chunks as Chunks
from .training import TrainingResult as TrainingResult
from .training import train as train

__version__: str
