from .learners.direct import Direct as Direct
from .learners.ppo import PPO as PPO
from .memory import Replay as Replay
from .policy import Attention as Attention
from .policy import Convolutional as Convolutional
from .policy import Policy as Policy
from .policy import Recurrent as Recurrent
from .policy import assert_equivariant as assert_equivariant
from .priority import Priority as Priority
from .priority import RoundRobin as RoundRobin
from .problem import Observation as Observation
from .problem import Problem as Problem
from .problem import Step as Step
from .result import TrainingResult as TrainingResult
from .runs.folder import load_run as load_run
from .runs.policy_file import load_policy as load_policy
from .runs.policy_file import save_policy as save_policy
from .tasks import Task as Task
from .tasks import Tasks as Tasks
from .tasks import TaskSets as TaskSets
from .tasks import draw_tasks as draw_tasks
from .tasks import split_entities as split_entities
from .training import Chunks as Chunks
from .training import train as train
from .training import train_runs as train_runs

__version__: str
