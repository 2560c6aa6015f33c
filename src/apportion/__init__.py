"""apportion: learn to share out a resource over time, over every subset of a universe of entities."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from apportion.learners.direct import Direct as Direct
    from apportion.learners.ppo import PPO as PPO
    from apportion.policy import Attention as Attention
    from apportion.policy import Convolutional as Convolutional
    from apportion.policy import Policy as Policy
    from apportion.policy import Recurrent as Recurrent
    from apportion.policy import assert_equivariant as assert_equivariant
    from apportion.priority import Priority as Priority
    from apportion.priority import RoundRobin as RoundRobin
    from apportion.problem import Problem as Problem
    from apportion.runs.folder import load_run as load_run
    from apportion.runs.policy_file import load_policy as load_policy
    from apportion.runs.policy_file import save_policy as save_policy
    from apportion.tasks import Tasks as Tasks
    from apportion.tasks import draw_tasks as draw_tasks
    from apportion.tasks import split_entities as split_entities
    from apportion.training import train as train
    from apportion.training import train_runs as train_runs

_HOME = {
    "Attention": "policy",
    "Convolutional": "policy",
    "Direct": "learners.direct",
    "PPO": "learners.ppo",
    "Policy": "policy",
    "Priority": "priority",
    "Problem": "problem",
    "Recurrent": "policy",
    "RoundRobin": "priority",
    "Tasks": "tasks",
    "assert_equivariant": "policy",
    "draw_tasks": "tasks",
    "load_policy": "runs.policy_file",
    "load_run": "runs.folder",
    "save_policy": "runs.policy_file",
    "split_entities": "tasks",
    "train": "training",
    "train_runs": "training",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    # JAX takes a second to import; the command line's help should not wait for it.
    if name not in _HOME:
        raise AttributeError(f"module 'apportion' has no attribute {name!r}")
    return getattr(import_module(f"apportion.{_HOME[name]}"), name)
