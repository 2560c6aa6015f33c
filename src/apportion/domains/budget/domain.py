"""The domain `budget`: a policy trained on a simulated advertising market.

The policy is compared with equal shares on its training tasks and on tasks of held-out campaigns, over
the same periods. Comparisons are paired by task.
"""

from typing import TYPE_CHECKING, Any

from apportion.domains.budget.settings import BudgetSettings
from apportion.domains.domain import Demonstration, Domain

if TYPE_CHECKING:
    from apportion.domains.budget.problem import Budget
    from apportion.runs.progress import Progress
    from apportion.runs.runner import PreparedJob


class BudgetDomain(Domain):
    """An advertising budget divided among campaigns."""

    name = "budget"
    settings = BudgetSettings
    examples = ("train budget --out runs/budget",)

    def prepare(self, settings: BudgetSettings) -> "PreparedJob":
        """Simulate the market and sample the tasks."""
        import hashlib

        import numpy as np
        import pandas as pd

        from apportion.certify.statistics import compare
        from apportion.domains.budget.problem import Budget
        from apportion.domains.training import compare_with_equal, draw_random_tasks, train_problem
        from apportion.problem import evaluate
        from apportion.runs.runner import JobResult, PreparedJob
        from apportion.tasks import split_entities
        from apportion.training import OnChunk, Resume

        seed = settings.seed
        problem = Budget.simulate(
            settings.universe, settings.periods, noise=settings.noise, seed=seed
        )
        digest = hashlib.sha256(np.asarray(problem.efficiency).tobytes()).hexdigest()[:16]
        data = {"source": "simulated", "campaigns": settings.universe, "fingerprint": digest}
        seen, unseen = split_entities(settings.universe, settings.held_out, seed=seed)
        own = shown = draw_random_tasks(seen, settings, seed)
        tested = {"own tasks, the record trained on": own}
        if settings.held_out:
            tested["held-out campaigns"] = shown = draw_random_tasks(unseen, settings, seed)

        def train(on_chunk: OnChunk, resume: Resume) -> JobResult:
            policy = train_problem(problem, settings, tasks=own, on_chunk=on_chunk, resume=resume)
            gains = {}
            for name, tasks in tested.items():
                found = compare_with_equal(problem, policy, settings, seed=seed, tasks=tasks)
                learned, equal = found.table["policy"], found.table["equal shares"]
                gains[name] = compare(np.asarray(learned / equal - 1), np.zeros(len(tasks)))
            first = evaluate(problem, policy, shown[:1], key=seed)
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
        """Return a market of 60 campaigns."""
        from apportion.domains.budget.problem import Budget

        return Budget.simulate(universe=60, periods=80, seed=0)


DOMAIN = BudgetDomain()
