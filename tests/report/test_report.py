"""A report shows the files of a folder, escapes all text, and is drawn in a real browser."""

import json
import re
import shutil
import time

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from apportion.domains.domain import find_domain
from apportion.report import plots, write_report
from apportion.report.page import Facts, Headline, Headlines, Picture, Section, Table, Words, page
from apportion.studies.study import FigureResult, Study, Verdict

HOSTILE = "<img src=x onerror=alert(1)>"
CLOSING = "</script><script>alert(2)</script>"
TICKERS = ["AAPL", "AMD", HOSTILE, CLOSING, "<b>BOLD</b>"]


def some_metrics(runs=3):
    run, step = (each.ravel() for each in np.mgrid[0:runs, 10:1001:10])
    rise = 1 - np.exp(-step / 300)
    noise = np.random.default_rng(0).normal(0, 0.05, len(step))
    columns = {"run": run, "step": step, "task": step % 8, "reward": rise + noise, "loss": -rise}
    return pd.DataFrame(columns | {"deviation": 0.3 * rise, "score": 0.3 * rise + noise**2})


def dated(values, columns, periods=120):
    days = pd.Index(pd.bdate_range("2019-01-01", periods=periods).astype(str), name="date")
    return pd.DataFrame(values, index=days, columns=columns)


def some_wealth():
    rng = np.random.default_rng(1)
    names = ["policy", "equal-crp", "best-crp", HOSTILE]
    return dated(np.exp(np.cumsum(rng.normal(0, 0.01, (120, 4)), 0)), names)


def some_shares():
    rng = np.random.default_rng(2)
    raw = np.exp(np.cumsum(rng.normal(0, 0.05, (120, len(TICKERS))), 0))
    return dated(raw / raw.sum(1, keepdims=True), TICKERS)


def some_probabilities():
    rng = np.random.default_rng(3)
    raw = np.exp(rng.normal(0, 0.3, (20, 8)))
    names = [f"{t}: {TICKERS[t % 5]}, {TICKERS[(t + 1) % 5]}" for t in range(8)]
    step = pd.Index(range(50, 1050, 50), name="step")
    return pd.DataFrame(raw / raw.sum(1, keepdims=True), index=step, columns=names)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    some_metrics().to_csv(folder / "metrics.csv", index=False)
    some_wealth().to_csv(folder / "values.csv")
    some_shares().to_csv(folder / "allocations.csv")
    some_probabilities().to_csv(folder / "probabilities.csv")
    strategies = {"strategy": [HOSTILE, "best-crp"], "sharpe": 0.7}
    strategies |= {"sharpe_low": -0.1, "sharpe_high": 1.6}
    pd.DataFrame(strategies).to_csv(folder / "strategies.csv", index=False)
    card = {"label": f"gain on {HOSTILE}", "value": "-2.0", "outcome": "does-not-hold"}
    headline = {"title": f"Run of {HOSTILE}", "cards": [card], "words": ["Nothing is established."]}
    (folder / "headline.json").write_text(json.dumps(headline))
    (folder / "settings.toml").write_text('job = "portfolio"\nmethod = "pmtl"\nsteps = 1000\n')
    environment = {"data": {"tickers": 5}}
    (folder / "environment.json").write_text(json.dumps(environment))
    results = {"trained_until": "2018-12-31", "in_sample_periods": 7, "hindsight": ["best-crp"]}
    (folder / "results.json").write_text(json.dumps(results))
    write_report(folder, find_domain("portfolio"))
    return folder


@pytest.fixture(scope="module")
def study_folder(tmp_path_factory):
    from matplotlib.figure import Figure

    verdicts = (
        Verdict("regret falls with N", True, -1.2, (-1.4, -1.0), 40),
        Verdict("prioritised beats uniform", False, 0.7, (-0.1, float("inf")), 10, paper=False),
    )
    table = pd.DataFrame({"N": range(300), "regret": np.linspace(1, 0, 300), "arm": HOSTILE})
    figures = [
        FigureResult(name, f"Title of {name}", table, (verdict,), Figure, [f"Note on {name}."])
        for name, verdict in zip(("fig3", "fig4"), verdicts, strict=True)
    ]
    folder = tmp_path_factory.mktemp("study")
    Study("fig3-4", figures).save(folder)
    write_report(folder)
    return folder


def test_every_plot_is_valid_names_its_units_and_is_described_in_words():
    metrics, axis = some_metrics(), {"title": "share (%)", "kind": "percent"}
    units = re.compile(r"\(.+\)$|^date$")
    for plot in (
        plots.learning_curve(metrics, "reward", "Reward"),
        plots.learning_curve(metrics.drop(columns="run"), "loss", "Loss"),
        plots.task_probabilities(some_probabilities(), "Chances"),
        plots.allocations(some_shares()),
        plots.lines("Lines", "1 word.", some_shares(), axis, trained="2019-02-01"),
    ):
        go.Figure({"data": plot.data, "layout": plot.layout})
        json.dumps({"data": plot.data, "layout": plot.layout}, allow_nan=False)
        for title in (plot.layout["title"], plot.layout["xaxis"]["title"]):
            assert units.search(title["text"]), title
        assert any(character.isdigit() for character in plot.description), plot.title


def test_allocations_are_drawn_as_points_from_equal_shares_and_the_furthest_first():
    shares = dated(np.tile([0.35, 0.25, 0.24, 0.16, 0.0], (120, 1)), list("abcde"))
    plot = plots.allocations(shares)
    # The last has no share in any period: it is absent, and equal shares are a quarter.
    assert [series["name"] for series in plot.data][:4] == ["a", "d", "c", "b"]
    assert plot.data[0]["y"][0] == pytest.approx(10)
    assert plot.data[1]["y"][0] == pytest.approx(-9)
    assert set(plot.data[4]["y"]) == {None}


def test_of_many_strategies_the_well_known_are_drawn_and_the_others_wait_in_the_legend():
    names = ["zebra", "equal-crp", *(f"s{i}" for i in range(10)), "policy"]
    wealth = dated(np.ones((120, len(names))), names)
    lines = plots.lines("Value", "1 each.", wealth, {"title": "value (%)", "kind": "log"}).data
    drawn = [line["name"] for line in lines if line["visible"] is True]
    assert drawn == ["policy", "equal-crp"]
    assert len(lines) == len(names)


def test_a_curve_of_a_single_run_is_its_median():
    metrics = pd.DataFrame({"step": np.arange(1, 501), "reward": np.repeat(np.arange(50.0), 10)})
    curve = plots.learning_curve(metrics, "reward", "Reward")
    assert curve.data[-1]["y"] == list(range(50))


def test_a_page_escapes_every_text_it_is_given():
    parts = [
        Words([HOSTILE]),
        Headlines([Headline(HOSTILE, HOSTILE, HOSTILE, HOSTILE)]),
        Facts(HOSTILE, {HOSTILE: {"inner": HOSTILE}}),
        Table(HOSTILE, pd.DataFrame({HOSTILE: [CLOSING]}), HOSTILE),
        Picture(HOSTILE, b"png", f'"{HOSTILE}'),
    ]
    text = page(CLOSING, [Section(HOSTILE, parts, HOSTILE)], subtitle=HOSTILE)
    assert "<img src=x" not in text
    assert "alert(2)</script>" not in text
    assert text.count("&lt;img src=x onerror=alert(1)&gt;") >= 12


def test_a_page_shows_the_settings_of_its_run_and_the_sections_of_its_domain(run_folder):
    text = (run_folder / "report.html").read_text()
    assert len(text) < 500_000
    assert not re.search(r"(src|href)=.?(https?:|//|/)", text)
    for fact in ("<dt>method</dt><dd>pmtl</dd>", "<dt>data.tickers</dt><dd>5</dd>"):
        assert fact in text
    assert "<dt>score and probability</dt>" in text
    assert "best-crp (hindsight)" in text
    assert not re.search(r"best-crp(?! \(hindsight\))", text)
    assert "In-sample: 7 of 120 periods, shaded, are days up to 2018-12-31" in text
    assert text.count('"layer":"below"') == 1
    assert "0.70 [-0.10, 1.60]" in text
    assert 'class="card fails"' in text


def test_a_study_page_shows_each_figure_with_its_verdicts_and_intervals(study_folder):
    text = (study_folder / "report.html").read_text()
    assert "[−1.4, −1]" in text
    assert "[−0.1, –]" in text
    assert text.count("The first 200 of 300 rows") == 2
    assert "<p>Note on fig4.</p>" in text
    assert 'alt="Title of fig3: regret falls with N: holds"' in text
    assert 'alt="Title of fig4: prioritised beats uniform: not established"' in text


def test_plotly_lies_beside_a_page_with_plots_or_inside_it(study_folder, tmp_path):
    # A run that has just started holds no more than settings and metrics.
    (tmp_path / "settings.toml").write_text('job = "budget"\n')
    some_metrics(runs=1).drop(columns="run").to_csv(tmp_path / "metrics.csv", index=False)
    text = write_report(tmp_path, inline=True).read_text()
    assert "Reward of the batch" in text
    assert "plotly.js v" in text
    assert not (tmp_path / "plotly.min.js").exists()
    assert "plotly.js v" not in write_report(tmp_path).read_text()
    assert "plotly.js v" in (tmp_path / "plotly.min.js").read_text()[:100]
    assert not (study_folder / "plotly.min.js").exists()


FLAGS = ["--headless=new", "--no-sandbox", "--no-first-run", "--window-size=1280,900"]
DISABLED = ("gpu", "quic", "background-networking", "component-update", "sync", "dev-shm-usage")
FLAGS += [f"--disable-{name}" for name in DISABLED]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("no browser: install chromium and chromium-driver (apt-get) to run these")
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chromium = webdriver.Chrome(options=options, service=Service(driver))
    yield chromium
    chromium.quit()


def show(browser, folder):
    browser.get((folder / "report.html").as_uri())
    wait(lambda: browser.execute_script(NOT_DRAWN) is None)


NOT_DRAWN = "return document.querySelector('.canvas:not(:has(.js-line, .heatmaplayer image))')"


@pytest.fixture(scope="module")
def desktop(browser, run_folder):
    """The page of the run, loaded once for the tests that only read it; they come first."""
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    show(browser, run_folder)
    return browser


def wait(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the page did not reach the expected state"
        time.sleep(0.1)


def requested(browser):
    """Addresses that the page requested."""
    messages = (json.loads(row["message"])["message"] for row in browser.get_log("performance"))
    return [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
        and message["params"]["documentURL"].endswith("report.html")
    ]


def errors(browser):
    return [row for row in browser.get_log("browser") if row["level"] in ("SEVERE", "WARNING")]


@pytest.mark.browser
def test_a_run_report_draws_and_names_every_plot_without_errors_or_network(desktop):
    assert len(desktop.find_elements("css selector", ".canvas.js-plotly-plot")) >= 7
    assert errors(desktop) == []
    requests = requested(desktop)
    names = {url.rpartition("/")[2] for url in requests if url.startswith("file:")}
    assert names == {"report.html", "plotly.min.js"}
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert not desktop.find_element("id", "no-plots").is_displayed()
    for canvas in desktop.find_elements("css selector", ".canvas"):
        assert canvas.accessible_name
        words = canvas.get_attribute("aria-describedby")
        assert desktop.find_element("id", words).text


@pytest.mark.browser
def test_a_hostile_name_stays_text_everywhere(desktop):
    from selenium.common.exceptions import NoAlertPresentException

    assert desktop.find_elements("css selector", "img[src='x'], [onerror]") == []
    with pytest.raises(NoAlertPresentException):
        _ = desktop.switch_to.alert
    path = "//figure[h3[contains(., 'equal shares over time')]]//*[@class='legendtext']"
    assert {name.text for name in desktop.find_elements("xpath", path)} == set(TICKERS)
    assert HOSTILE in desktop.find_element("css selector", "h1").text


@pytest.mark.browser
def test_a_page_without_its_script_reports_that_it_is_missing(browser, run_folder, tmp_path):
    shutil.copy(run_folder / "report.html", tmp_path)
    browser.get((tmp_path / "report.html").as_uri())
    assert (
        "plotly.min.js is not in the folder of this page"
        in browser.find_element("id", "no-plots").text
    )
    assert browser.find_element("xpath", "//figure[h3='Value of 1 invested']/figcaption").text
    # An inline page needs no script beside it.
    shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("*.js"))
    write_report(tmp_path / "run", inline=True)
    show(browser, tmp_path / "run")
