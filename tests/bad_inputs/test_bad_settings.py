"""Settings of every job, on the command line and in a file."""

from refusals import WIDE, assert_refused, cases


def options(job: str, *rows: tuple):
    """Rows (options, words...) that `train JOB` must refuse."""
    for given, *words in rows:
        yield f"{job} {given}", f"train {job} --out out {given}", words, {"p.csv": WIDE}


def settings(job: str, *rows: tuple):
    """Rows (TOML, words...) that `train JOB --config` must refuse."""
    for text, *words in rows:
        yield f"{job}, {text}", f"train {job} --out out --config s.toml", words, {"s.toml": text}


@cases(
    *options(
        "budget",
        ("--seed=-1", "seed is -1", "from 0 to"),
        ("--seed 1.5", "--seed", 'unable to convert "1.5" into int; see'),
        ("--seed", "--seed requires an argument"),
        ("--seed 1 --seed 2", "--seed specified multiple times"),
        ("--tasks 0", "tasks is 0", "at least 1"),
        ("--task-size 99", "task_size 99", "are not enough"),
        ("--alpha nan", "alpha is nan", "finite"),
        ("--learning-rate 0", "learning_rate is 0.0", "above 0"),
        ("--method ptml", '"ptml" for --method', 'Did you mean "pmtl"?'),
        ("--method mtl --alpha 0.9", "alpha is 0.9", "method mtl samples tasks uniformly"),
        ("--taskz 3", "did you mean --tasks?"),
        ("extra", "unexpected argument 'extra'"),
    ),
    *options(
        "portfolio --prices p.csv",
        ("--trust 1.5", "trust is 1.5", "between 0 and 1"),
        ("--task-size 2 --window 100", "window of 100"),
        ("--task-size 2 --window 8 --batch 100", "a batch has 100"),
        ("--task-size 4", "task_size 4: there are only 3 training instruments"),
        ("--max-weight 0.05", "can then hold only"),
        ("--min-weight 0.5 --task-size 3", "would need 1.5"),
        ("--min-weight 0.2 --max-weight 0.1", "min_weight 0.2 and max_weight 0.1"),
        ("--until 01/02/2019", "'01/02/2019' is not a day"),
        ("--until 1999-01-01", "choose a later day"),
    ),
    *options(
        "charging",
        ("--capacity 0.5", "--capacity requires 2"),
        ("--capacity 0.9 0.1", "capacity 0.9 0.1"),
        ("--held-out 1", "held_out is 1"),
        ("--task-size 1000", "too few for tasks of 1000"),
    ),
    *options(
        "federated",
        ("--members 2", "members is 2"),
        ("--learner gradient --clients 3 4", "no option --clients"),
        ("--images none.npz", "none.npz: no such file"),
        ("--learner dqn", "choose gradient, ppo"),
    ),
    *settings(
        "budget",
        ("seed = ", "s.toml: not valid TOML"),
        ('seed = "a"', "s.toml: seed is 'a'"),
        (f"alpha = {10**400}", "alpha is too large"),
        (f"alpha = {'[' * 3000}{']' * 3000}", "s.toml: not valid TOML"),
        ("sed = 1", "did you mean seed?"),
        ('job = "portfolio"', "settings of 'portfolio', not of 'budget'"),
        ("[seed]\na = 1", "seed is {'a': 1}"),
    ),
    *settings(
        "portfolio",
        ("cost = 0.9", "cost is 0.9"),
        ('allow_jumps = "yes"', "allow_jumps is 'yes'"),
    ),
    ("no file", "train budget --out out --config s.toml", ("s.toml: no such file",)),
    (
        "no folder",
        "train budget",
        ("train budget: parameter --out requires", "see apportion train budget"),
    ),
    ("a slip in out", "train budget --outt=x", "Did you mean --out instead of --outt=x?"),
    ("no such job", "train portfoli --out out", ("did you mean portfolio?",)),
    ("out is a file", "train budget --out f", ("f: is a file",), {"f": "mine"}),
    ("out holds a run", "train budget --out run", ("contains a run", "resume"), {}, "budget"),
    (
        "out holds others",
        "train budget --out d",
        "files, such as policy.json",
        {"d/policy.json": ""},
    ),
)
def test_settings_and_places_that_are_wrong_are_refused(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)
