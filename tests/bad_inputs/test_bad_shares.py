"""Holdings and costs of a portfolio."""

from functools import reduce

from refusals import WIDE, assert_refused, cases, cell

ALLOCATE = "allocate run --prices p.csv --holdings"
UNITS = "ticker,quantity\nA,10\ncash,100\n"
TRAIN = (
    "train portfolio --prices p.csv --out out --task-size 2 --window 8 --batch 16 --validation 0"
)


def files(*rows: tuple[str, str | bytes, str]):
    """Rows (name, content, words) of holdings that must be refused."""
    for name, content, words in rows:
        given = {"h.csv": content, "p.csv": WIDE}
        yield name, f"{ALLOCATE} h.csv", ("h.csv", words), given, "portfolio"


@cases(
    *files(
        ("unknown", "ticker,quantity\nA,1\nD,1\n", "'D' in row 2 is not among the prices"),
        ("two lines", 'ticker,quantity\n"A\nB",1\n', r"'A\nB' in row 1 is not among the prices"),
        ("text", "ticker,share\nA,much\n", "'A' in row 1 has no share from 0"),
        ("too much", "ticker,quantity\nA,1e16\n", "'A' in row 1 has no quantity from 0 to 1e+15"),
        ("negative", "ticker,quantity\nA,1.5\nB,-0.5\n", "'B' in row 2 has no quantity from 0"),
        ("twice, a space apart", "ticker,share\nA,0.5\n A,0.5\n", "'A' in row 2 occurs twice"),
        ("empty", "", "cannot be read"),
        ("other names", "name,weight\nA,1\n", "not a table of holdings"),
        ("cash without cash", "ticker,share\ncash,1\n", "'cash' in row 1 is not among the prices"),
        ("too little", "ticker,share\nA,0.5\n", "sums to 0.5"),
        ("nothing", "ticker,quantity\nA,0\ncash,0\n", "must not all be 0"),
    )
)
def test_holdings_that_are_wrong_are_refused(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)


PRICES = {"p.csv": WIDE}
HELD = PRICES | {"h.csv": UNITS}
LATE = PRICES | {"h.csv": UNITS, "p.csv": cell(40, 1, "")}
GONE = HELD | {"p.csv": reduce(lambda table, row: cell(row, 1, "", table), range(33, 41), WIDE)}


@cases(
    ("other out", f"{ALLOCATE} h.csv --out o.txt", ("o.txt", ".csv"), HELD, "portfolio"),
    ("out is read", f"{ALLOCATE} h.csv --out ./h.csv", ("h.csv: already exists",), HELD, "portfolio"),
    ("out in a file", f"{ALLOCATE} h.csv --out p.csv/o.csv", ("is a file",), HELD, "portfolio"),
    ("cut short", f"{ALLOCATE} h.csv", ("A has no price on", "remove the instrument"), LATE, "portfolio"),
    ("no price", f"{ALLOCATE} h.csv", ("A is held but has no price",), GONE, "portfolio"),
    ("in a garage", "allocate run --holdings h.csv", ("no option --holdings",), {}, "charging"),
)  # fmt: skip
def test_trades_that_cannot_be_made_are_refused(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)


@cases(
    ("no holdings", f"{ALLOCATE} h.csv", ("h.csv: no such file",), PRICES, "portfolio"),
    ("cost is negative", f"{TRAIN} --cost=-0.1", ("cost is -0.1",), PRICES),
    ("backtest", "backtest run --prices p.csv --cost 0.7", "cost is 0.7", PRICES, "portfolio"),
)
def test_no_command_works_on_wrong_shares(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)
