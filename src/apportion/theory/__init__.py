"""Theory on finite MDPs: concentrability, task distance, the performance bound, and when to pool tasks."""

from apportion.theory.bound import LearningError as LearningError
from apportion.theory.bound import TransferConstants as TransferConstants
from apportion.theory.bound import corollary_2 as corollary_2
from apportion.theory.bound import error_bound as error_bound
from apportion.theory.distance import concentrability as concentrability
from apportion.theory.distance import distance_by_enumeration as distance_by_enumeration
from apportion.theory.distance import stationary_constant as stationary_constant
from apportion.theory.distance import task_distance as task_distance
from apportion.theory.mdp import MDP as MDP
from apportion.theory.mdp import every_policy as every_policy
from apportion.theory.mdp import norm as norm
from apportion.theory.mdp import random_family as random_family
from apportion.theory.pooling import Transitions as Transitions
from apportion.theory.pooling import draw_transitions as draw_transitions
from apportion.theory.pooling import should_pool as should_pool
