"""What the rest of the house asks of budgets: a policy trained on a simulated advertising market.

Judged by what it earns beyond equal shares, on its own tasks and on tasks of campaigns it never saw, on the
same market's record; each comparison is paired by task.
"""

from typing import TYPE_CHECKING, Any

from apportion.domains.budget.settings import BudgetSettings
from apportion.domains.domain import Demonstration, Domain

if TYPE_CHECKING:
    from apportion.domains.budget.problem import Budget
    from apportion.runs.progress import Progress
    from apportion.runs.runner import PreparedJob


class BudgetDomain(Domain):
    """An advertising budget, shared out over campaigns."""

    name = "budget"
    settings = BudgetSettings
    examples = ("train budget --out runs/budget",)

    def prepare(self, settings: BudgetSettings) -> "PreparedJob":
        """Simulate the market and draw the tasks."""
        import hashlib

        import jax
        import numpy as np
        import pandas as pd

        from apportion.certify.statistics import compare
        from apportion.composition import EqualShares
        from apportion.domains.budget.problem import Budget
        from apportion.domains.training import averaged, train_members
        from apportion.learners.direct import Direct
        from apportion.memory import Replay
        from apportion.policy import Recurrent
        from apportion.problem import evaluate
        from apportion.runs.runner import JobResult, PreparedJob
        from apportion.tasks import Task, count_tasks, draw_tasks, split_entities
        from apportion.training import Chunks, OnChunk, Resume

        problem = Budget.simulate(
            settings.universe, settings.periods, noise=settings.noise, seed=settings.seed
        )
        digest = hashlib.sha256(np.asarray(problem.efficiency).tobytes()).hexdigest()[:16]
        data = {"source": "simulated", "campaigns": settings.universe, "fingerprint": digest}

        def tasks_of(entities: np.ndarray) -> Task:
            count = min(settings.tasks, count_tasks(len(entities), settings.task_size))
            return draw_tasks(entities, settings.task_size, count, seed=settings.seed)

        seen, unseen = split_entities(settings.universe, settings.held_out, seed=settings.seed)
        own = shown = tasks_of(seen)
        tested = {"own tasks, the record trained on": own}
        if settings.held_out:
            tested["held-out campaigns"] = shown = tasks_of(unseen)

        def train(on_chunk: OnChunk, resume: Resume) -> JobResult:
            training = train_members(
                problem,
                own,
                lambda key: Recurrent(channels=2, hidden=settings.hidden, key=key),
                Direct(settings.batch, settings.learning_rate),
                settings,
                replay=Replay(warm_up=problem.horizon, act_periods=1),
                chunks=Chunks(settings.chunk, on_chunk=on_chunk),
                state=resume,
            )
            policy = averaged(training.policy, settings.members)
            key, gains = jax.random.key(settings.seed), {}
            for name, tasks in tested.items():
                learned = evaluate(problem, policy, tasks, key=key).mean_reward[:, 0]
                equal = evaluate(problem, EqualShares(), tasks, key=key).mean_reward[:, 0]
                gains[name] = compare(np.asarray(learned / equal - 1), np.zeros(len(tasks)))
            first = evaluate(problem, policy, shown[:1], key=key)
            names = pd.Index([f"campaign {i}" for i in np.asarray(shown.members[0])])
            shares = pd.DataFrame(np.asarray(first.allocations)[0, 0], columns=names)
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
                " ".join(card[key] for key in ("label", "value", "interval")) for card in cards
            ]
            return JobResult(
                policy,
                {"gain_over_equal": {name: gain.to_dict() for name, gain in gains.items()}},
                "\n".join(words),
                {"job": "budget", "window": problem.window},
                {"title": "An advertising budget", "subtitle": settings.method, "cards": cards},
                {"allocations": shares.rename_axis("period").reset_index()},
            )

        return PreparedJob(data, train)

    def demonstrate(self, seed: int, progress: "Progress") -> Demonstration:
        from apportion.domains.budget.demonstration import demonstrate_budget

        return demonstrate_budget(seed, progress)

    def problem(self) -> "Budget":
        """A market of 60 campaigns."""
        from apportion.domains.budget.problem import Budget

        return Budget.simulate(universe=60, periods=80, seed=0)


DOMAIN = BudgetDomain()
