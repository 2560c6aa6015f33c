"""What the rest of the house asks of budgets: a policy trained on a simulated advertising market.

Judged by what it earns beyond equal shares, on its own tasks and on tasks of campaigns it never saw, on the
same market's record; each comparison is paired by task.
"""

from typing import TYPE_CHECKING, Any

from apportion.domains.budget.settings import BudgetSettings
from apportion.domains.domain import Domain

if TYPE_CHECKING:
    from apportion.domains.budget.problem import Budget
    from apportion.policy import Policy
    from apportion.runs.job import Outcome, PreparedJob
    from apportion.statistics import Estimate
    from apportion.tasks import Tasks
    from apportion.training import OnChunk, Resume


class BudgetDomain(Domain):
    """An advertising budget, shared out over campaigns."""

    name = "budget"
    settings = BudgetSettings
    examples = ("train budget --out runs/budget",)

    def prepare(self, settings: BudgetSettings) -> "PreparedJob":
        """Simulate the market and draw the tasks."""
        import hashlib

        import numpy as np

        from apportion.domains.budget.problem import Budget
        from apportion.domains.training import averaged, train_members
        from apportion.learners.direct import Direct
        from apportion.memory import Replay
        from apportion.policy import Recurrent
        from apportion.runs.job import PreparedJob
        from apportion.tasks import count_tasks, draw_tasks, split_entities
        from apportion.training import Chunks

        problem = Budget.simulate(
            settings.universe, settings.periods, noise=settings.noise, seed=settings.seed
        )
        digest = hashlib.sha256(np.asarray(problem.efficiency).tobytes()).hexdigest()[:16]
        data = {"source": "simulated", "campaigns": settings.universe, "fingerprint": digest}

        def tasks_of(entities: np.ndarray) -> "Tasks":
            count = min(settings.tasks, count_tasks(len(entities), settings.task_size))
            return draw_tasks(entities, settings.task_size, count, seed=settings.seed)

        seen, unseen = split_entities(settings.universe, settings.held_out, seed=settings.seed)
        own, fresh = tasks_of(seen), tasks_of(unseen) if settings.held_out else None

        def train(on_chunk: "OnChunk", resume: "Resume") -> "Outcome":
            training = train_members(
                problem,
                own,
                lambda key: Recurrent(channels=2, hidden=settings.hidden, key=key),
                Direct(settings.batch, settings.learning_rate),
                settings,
                replay=Replay(warm_up=problem.horizon),
                chunks=Chunks(settings.chunk, on_chunk=on_chunk),
                state=resume,
            )
            policy = averaged(training.policy, settings.members)
            return _judge(problem, policy, own, fresh, settings)

        return PreparedJob(data, train)

    def problem(self) -> "Budget":
        """A market of 60 campaigns."""
        from apportion.domains.budget.problem import Budget

        return Budget.simulate(universe=60, periods=80, seed=0)


DOMAIN = BudgetDomain()


def _judge(
    problem: "Budget",
    policy: "Policy",
    own: "Tasks",
    fresh: "Tasks | None",
    settings: BudgetSettings,
) -> "Outcome":
    """The policy against equal shares, task by task."""
    import jax
    import numpy as np
    import pandas as pd

    from apportion.composition import EqualShares
    from apportion.problem import evaluate
    from apportion.runs.job import Outcome
    from apportion.statistics import compare

    key = jax.random.key(settings.seed)
    gains: dict[str, Estimate] = {}
    for name, tasks in (("own tasks, the record trained on", own), ("held-out campaigns", fresh)):
        if tasks is not None:
            learned = evaluate(problem, policy, tasks, key=key).mean_reward[:, 0]
            equal = evaluate(problem, EqualShares(), tasks, key=key).mean_reward[:, 0]
            gains[name] = compare(np.asarray(learned / equal - 1), np.zeros(len(tasks)))
    shown = own if fresh is None else fresh
    allocations = np.asarray(evaluate(problem, policy, shown[:1], key=key).allocations)[0, 0]
    names = pd.Index([f"campaign {i}" for i in np.asarray(shown.members[0])])
    shares = pd.DataFrame(allocations, columns=names).rename_axis("period").reset_index()
    cards: list[dict[str, Any]] = [
        {
            "label": f"Sales over equal shares, {name}",
            "value": f"{gain.value:+.1%}",
            "interval": f"[{gain.low:+.1%}, {gain.high:+.1%}]",
            "note": f"paired over {gain.n} tasks",
            "outcome": gain.outcome,
        }
        for name, gain in gains.items()
    ]
    words = [
        f"sales over equal shares, {name}: {gain.value:+.1%} [{gain.low:+.1%}, {gain.high:+.1%}] over "
        f"{gain.n} tasks"
        for name, gain in gains.items()
    ]
    return Outcome(
        policy,
        {"gain_over_equal": {name: gain.to_dict() for name, gain in gains.items()}},
        "\n".join(words),
        {"job": "budget", "window": problem.window},
        {"title": "An advertising budget", "subtitle": settings.method, "cards": cards},
        {"allocations": shares},
    )
