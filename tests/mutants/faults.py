"""Deliberate faults, each with the tests that must notice it: file, text, what it becomes, tests."""

# ruff: noqa: E501

from typing import NamedTuple


class Fault(NamedTuple):
    """One change of the source that makes it wrong."""

    name: str
    file: str
    """Below src/apportion."""
    text: str
    becomes: str
    tests: str
    """What pytest is given."""


_GRID = "packages/studies/tests/portfolio/test_fig3_4.py::test_"
_RECIPE = "packages/studies/tests/portfolio/test_recipe.py::test_"
_FEDERATIONS = "packages/studies/tests/federated/test_federations.py::test_"
_FIG6 = "packages/studies/tests/federated/test_fig6.py::test_"
_CHARGING = "packages/studies/tests/charging/test_charging_study.py::test_"
_STATISTICS = "tests/certify/test_statistics.py"
_VERDICTS = "tests/studies/test_verdicts.py"
_THEOREM = "tests/theory/test_bound.py"
_PEERS = "packages/charging/tests/test_schedulers.py::test_"
_ROBUST = "tests/domains/federated/test_aggregators.py"

EVIDENCE = (
    Fault("training reaches into the test year (grid)", "packages/studies/src/apportion_studies/portfolio/experiments.py",
          "self.years.known(self.training.window)[year],",
          "self.years.known(self.training.window)[year] + jnp.asarray(self.years.days)[year],",
          _GRID + "multi_task_methods_differ_by_alpha_alone"),
    Fault("MTL and P-MTL have each other's alpha", "src/apportion/domains/settings.py",
          'return self.alpha if self.method == "pmtl" else 0.0',
          'return self.alpha if self.method != "pmtl" else 0.0',
          _GRID + "multi_task_methods_differ_by_alpha_alone"),
    Fault("single-task learning is given all tasks (settings)", "src/apportion/domains/settings.py",
          'tasks[:1] if self.method == "stl" else tasks', "tasks",
          "tests/domains/test_budget.py -k single_task_learning"),
    Fault("label flippers do not flip (kinds)", "src/apportion/domains/federated/data.py",
          "named[client] = digits.classes - 1 - named[client]", "named[client] = named[client]",
          "tests/domains/federated/test_federated_data.py -k attack"),
    Fault("PPO's clip takes the larger", "src/apportion/learners/ppo.py",
          "return jnp.minimum(ratio * advantage, held * advantage)",
          "return jnp.maximum(ratio * advantage, held * advantage)",
          "tests/learners/test_ppo.py::test_a_gain_is_counted_up_to_the_clip_and_a_loss_in_full"),
    Fault("a t interval reaches to the quantile .95", "src/apportion/certify/statistics.py",
          "special.stdtrit(freedom, 0.5 + CONFIDENCE / 2)", "special.stdtrit(freedom, CONFIDENCE)",
          _STATISTICS),
    Fault("Theorem 1' loses a 1/(1-g), distance", "src/apportion/theory/bound.py",
          "_carry(2 * np.sqrt(self.first) / (1 - g), self.distance),",
          "_carry(2 * np.sqrt(self.first), self.distance),", _THEOREM),
    Fault("Theorem 1 loses its root of 2", "src/apportion/theory/bound.py",
          "3 * np.sqrt(2 * self.first)", "3 * np.sqrt(self.first)", _THEOREM),
    Fault("the crossover rule is 2.3 times off (should_pool)", "src/apportion/theory/pooling.py",
          "np.where(squared > 0, self.samples * self.room / squared, np.inf)",
          "np.where(squared > 0, 2.3 * self.samples * self.room / squared, np.inf)",
          "tests/theory/test_pooling.py"),
)  # fmt: skip

STUDIES = (
    Fault("the first step is read for the last", "packages/studies/src/apportion_studies/portfolio/fig3_4.py",
          'step.transform("max")', 'step.transform("min")', _GRID + "each_claim_names_its_protocol_and_its_years"),
    Fault("a policy is stopped by its own test year", "packages/studies/src/apportion_studies/portfolio/experiments.py",
          "year=best.year + 1)", "year=best.year)", _GRID + "every_arm_is_stopped_where_it_was_best_in_the_year_before"),
    Fault("a choice sees its own year", "packages/studies/src/apportion_studies/portfolio/recipe.py",
          "before = own[own.year < year]", "before = own[own.year <= year]",
          _RECIPE + "choices_never_look_at_the_year_they_are_made_for"),
    Fault("a lead is the other's", "packages/studies/src/apportion_studies/charging/charging.py",
          "gains = 100 * (one.drawn_kwh - other.drawn_kwh)", "gains = 100 * (other.drawn_kwh - one.drawn_kwh)",
          _CHARGING + "a_lead_is_plain_arithmetic_clustered_by_days_and_splits"),
    Fault("a harm of a third is no harm", "packages/studies/src/apportion_studies/federated/federations.py",
          "list(gains.values()), above=-0.003,", "list(gains.values()), above=-0.3,", _FEDERATIONS + "seeds_that_disagree_leave_open_whether_a_kind_is_harmed"),
    Fault("tasks of a seed are counted as seeds", "packages/studies/src/apportion_studies/federated/fig6.py",
          "else own[..., -1]).mean(-1)", "else own[..., -1]).ravel()",
          _FIG6 + "a_method_beats_fedavg_only_if_its_gain_is_positive"),
    Fault("a broken bound is no failure", "packages/studies/src/apportion_studies/theory/common.py",
          "(worst > 1 + 1e-9)", "(worst > 2)", "packages/studies/tests/theory/test_bound_study.py -k broken"),
    Fault("an adjusted verdict is the plain one", "src/apportion/studies/study.py",
          'adjusted=v.outcome if next(sure[v.paper]) else "not-established"', "adjusted=v.outcome",
          _VERDICTS),
    Fault("all is any", "src/apportion/studies/study.py",
          'holds, refuted, p = all(one == "holds"', 'holds, refuted, p = any(one == "holds"', _VERDICTS),
    Fault("Holm multiplies the largest most", "src/apportion/certify/statistics.py",
          "np.arange(len(p), 0, -1)", "np.arange(1, len(p) + 1)", _STATISTICS),
    Fault("a point decides", "src/apportion/certify/statistics.py",
          "if estimate.low > above and estimate.high < below:",
          "if above < estimate.value < below:", _STATISTICS),
)  # fmt: skip

DOMAINS = (
    Fault("least laxity is latest departure", "packages/charging/src/apportion_charging/schedulers.py",
          '"llf": _serve_by(lambda seen: seen.said.laxity)', '"llf": _serve_by(lambda seen: -seen.said.laxity)',
          _PEERS + "wishes_equal_those_made_car_by_car"),
    Fault("what is offered counts as drawn", "packages/charging/src/apportion_charging/problem.py",
          "(seen, drawn, state.peak_kw)",
          "(seen, allocation[: len(members)] * state.capacity_kw, state.peak_kw)",
          "packages/charging/tests/test_charging_problem.py -k equal_shares_deliver"),
    Fault("the literal update looks back", "packages/studies/src/apportion_studies/portfolio/literal.py",
          "jax.vmap(step)(batch.states,", "jax.vmap(step)(rolled.new_states,",
          "packages/studies/tests/portfolio/test_literal.py -k charges"),
    Fault("acting that should stop goes on", "src/apportion/memory.py",
          "if replay.stops:", "if False:", "tests/test_algorithm.py -k positions"),
    Fault("a shared network is not shared", "packages/studies/src/apportion_studies/theory/equivariance.py",
          "jax.vmap(self.network)(x[:, None])[:, 0]",
          "jax.vmap(self.network)(x[:, None])[:, 0] * jnp.arange(1.0, 1 + len(x))",
          "packages/studies/tests/theory/test_equivariance.py -k one_network"),
    Fault("the median is a mean", "src/apportion/domains/federated/aggregators.py",
          "return _by_rank(received, (m - 1) // 2, m // 2 + 1)",
          "return _by_rank(received, jnp.zeros_like(m), m)", _ROBUST),
    Fault("goodwill does not carry over", "src/apportion/domains/budget/problem.py",
          "goodwill = self.carry[task.members] * state.goodwill + allocation", "goodwill = allocation",
          "tests/domains/test_budget.py -k formulas"),
    Fault("drawdown is from the start", "src/apportion/domains/portfolio/record.py",
          "np.maximum.accumulate(path, -1)", "path[..., :1]",
          "tests/domains/portfolio/test_backtest.py -k metric"),
    Fault("a window shows the day it decides for", "src/apportion/domains/portfolio/market.py",
          "self.prices[row, task.members, 0] / self.prices[row - 1, task.members, 0]",
          "self.prices[row - 1, task.members, 0] / self.prices[row - 2, task.members, 0]",
          "tests/domains/portfolio/test_market.py"),
    Fault("weights are corrected the wrong way", "src/apportion/priority.py",
          "weight = (state.powers.least / power) ** beta", "weight = (power / state.powers.least) ** beta",
          "tests/test_priority.py -k exact"),
    Fault("a score forgets and keeps the other way", "src/apportion/priority.py",
          "score = s * drawn.score + (1 - s)", "score = (1 - s) * drawn.score + s",
          "tests/test_priority.py -k exact"),
)  # fmt: skip

THEORY = (
    Fault("the average MDP has the first task's kernel", "src/apportion/theory/mdp.py",
          "MDP(self.kernel.mean(-4), self.reward.mean(-3), self.gamma)",
          "MDP(self.kernel[..., 0, :, :, :], self.reward.mean(-3), self.gamma)", "tests/theory/test_mdp.py"),
    Fault("C' loses its (1 - gamma)", "src/apportion/theory/distance.py",
          "first = (1 - gamma) * (gamma**m * c).sum(-1)", "first = (gamma**m * c).sum(-1)",
          "tests/theory/test_distance.py"),
    Fault("LSPI's values are not clipped", "src/apportion/theory/lspi.py",
          "value = jnp.clip(phi @ pathwise_lstd(phi[path], gained, gamma), -v_max, v_max)",
          "value = phi @ pathwise_lstd(phi[path], gained, gamma)",
          "tests/theory/test_lspi.py::test_the_clip_binds_where_features_carry_a_value_to_a_state_not_visited"),
    Fault("the pool's noise is a task's", "src/apportion/theory/pooling.py",
          "average = (share**2 * own).sum(0)", "average = (share * own).sum(0)",
          "tests/theory/test_pooling.py"),
)  # fmt: skip

BRIDGES = (
    Fault("what is held does not enter", "src/apportion/bridges/skfolio.py",
          "window=self.window, held=held)", "window=self.window)",
          "tests/bridges/test_skfolio.py::test_what_is_held_enters_the_decision"),
    Fault("terminated is truncated", "src/apportion/bridges/gymnasium/environments.py",
          "ends = bool(step.terminated), bool(step.truncated)",
          "ends = bool(step.truncated), bool(step.terminated)",
          "tests/bridges/test_gymnasium.py::test_a_garage_s_shares_keep_to_its_limits_and_its_day_terminates"),
    Fault("without scores Flower weighs all alike", "src/apportion/bridges/flower/strategy.py",
          "shares = fedavg_shares(sample_counts(updates, self.weighted_by_key))",
          "shares = np.full(len(updates), 1 / len(updates))",
          "tests/bridges/flower/test_strategy.py::test_in_the_fallback_a_claim_counts_at_most_ten_times_the_median"),
)  # fmt: skip

FAULTS = EVIDENCE + STUDIES + DOMAINS + THEORY + BRIDGES
