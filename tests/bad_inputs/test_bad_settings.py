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
        ("--seed 4294967296", "seed is 4294967296"),
        ("--seed 1.5", "--seed is '1.5'", "a whole number"),
        ("--seed one", "--seed is 'one'"),
        ("--seed", "--seed needs a value"),
        ("--seed 1 --seed 2", "--seed is given twice"),
        ("--tasks 0", "tasks is 0", "at least 1"),
        ("--steps=-5", "steps is -5"),
        ("--members 0", "members is 0"),
        ("--chunk 0", "chunk is 0"),
        ("--hidden 0", "hidden is 0"),
        ("--batch 0", "batch is 0"),
        ("--task-size 99", "task_size 99", "too few"),
        ("--universe 0", "too few"),
        ("--alpha nan", "alpha is nan", "finite"),
        ("--learning-rate 0", "learning_rate > 0"),
        ("--noise=-1", "noise must be >= 0"),
        ("--method ptml", "choose pmtl, mtl, stl", "did you mean pmtl?"),
        ("--scorer loudest", "choose max-deviation"),
        ("--method mtl --alpha 0.9", "alpha is 0.9", "ignored by method mtl"),
        ("--method stl --beta 0", "beta is 0", "ignored by method stl"),
        ("--taskz 3", "did you mean --tasks?"),
        ("--zz 1", "no option --zz; see apportion train budget"),
        ("--noise a", "--noise is 'a'; it must be a number"),
        ("extra", "one argument too many"),
    ),
    *options(
        "portfolio --prices p.csv",
        ("--trust 1.5", "trust is 1.5", "between 0 and 1"),
        ("--trade-fraction=-0.1", "trade_fraction is -0.1"),
        ("--tracking-error-weight=-1", "tracking_error_weight must be >= 0"),
        ("--window 0", "window is 0"),
        ("--task-size 2 --window 100", "window of 100"),
        ("--task-size 2 --window 8 --batch 100", "a batch has 100"),
        ("--task-size 4", "task_size 4: only 3 instruments"),
        ("--task-size 2 --held-out 2", "only 1 instruments"),
        ("--held-out=-1", "-1"),
        ("--held-out 5", "5"),
        ("--max-weight 0", "min_weight 0 and max_weight 0"),
        ("--max-weight 0.05", "can then hold only"),
        ("--min-weight 0.5 --task-size 3", "would need 1.5"),
        ("--min-weight 0.2 --max-weight 0.1", "min_weight 0.2 and max_weight 0.1"),
        ("--max-turnover 0", "max_turnover is 0"),
        ("--max-turnover 3", "max_turnover is 3"),
        ("--until 01/02/2019", "'01/02/2019' is not a day"),
        ("--until 1999-01-01", "choose a later day"),
        ("--validation=-1", "validation is -1"),
        ("--task-size 2 --window 8 --batch 16 --cost 50%", "--cost is '50%'"),
        ("--prices p.csv", "given twice"),
    ),
    *options(
        "charging",
        ("--capacity 0 1", "capacity 0 1"),
        ("--capacity 0.5", "--capacity needs 2 values"),
        ("--capacity 0.9 0.1", "capacity 0.9 0.1"),
        ("--capacity nan 1", "capacity"),
        ("--held-out 1", "held_out is 1"),
        ("--days 0", "days is 0"),
        ("--learning-rate=-1", "learning_rate is -1"),
        ("--task-size 1000", "too few for tasks of 1000"),
    ),
    *options(
        "federated",
        ("--members 2", "members is 2"),
        ("--learner ppo --clients 3", "--clients needs 2 values"),
        ("--learner gradient --clients 3 4", "no option --clients"),
        ("--samples 0", "samples is 0"),
        ("--images none.npz", "none.npz: no such file"),
        ("--learner dqn", "choose gradient, ppo"),
    ),
    *settings(
        "budget",
        ("seed = ", "s.toml: not valid TOML"),
        ("seed = 1\nseed = 2", "s.toml: not valid TOML"),
        ('seed = "a"', "s.toml: seed is 'a'"),
        ("seed = 1.5", "seed is 1.5"),
        ("seed = true", "seed is True"),
        (f"alpha = {10**400}", "alpha is too large"),
        (f"alpha = {'[' * 3000}{']' * 3000}", "s.toml: not valid TOML"),
        ("sed = 1", "did you mean seed?"),
        ('method = "ptml"', "did you mean pmtl?"),
        ('job = "portfolio"', "settings of 'portfolio', not of 'budget'"),
        ("[seed]\na = 1", "seed is {'a': 1}"),
        ("tasks = [1]", "tasks is [1]"),
    ),
    *settings(
        "portfolio",
        ('cost = "none.csv"', "cost is 'none.csv'"),
        ("cost = 0.9", "cost is 0.9"),
        ("cost = true", "cost is True"),
        ('allow_jumps = "yes"', "allow_jumps is 'yes'"),
        ("prices = 3", "prices is 3"),
    ),
    ("no file", "train budget --out out --config s.toml", ("s.toml: no such file",)),
    ("a folder", "train budget --out out --config .", ("cannot be read",)),
    ("not UTF-8", "train budget --out out --config s.toml", "not valid TOML", {"s.toml": b"\xff"}),
    ("no folder", "train budget", "train budget: --out DIR is missing; see apportion train budget"),
    ("a slip in out", "train budget --outt=x", "no option --outt; did you mean --out?"),
    ("no such job", "train portfoli --out out", ("did you mean portfolio?",)),
    ("out is a file", "train budget --out f", ("f: is a file",), {"f": "mine"}),
    ("out inside a file", "train budget --out f/x", ("f/x", "is a file"), {"f": "mine"}),
    ("out holds a run", "train budget --out run", ("already holds a run", "resume"), {}, "budget"),
    (
        "out holds others",
        "train budget --out d",
        "files, such as policy.json",
        {"d/policy.json": ""},
    ),
)
def test_settings_and_places_that_are_wrong_are_refused(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)
