"""The tables of the page on speed, filled from what the benchmarks and the studies wrote."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOPED = {1: 8_000, 10: 60_000, 90: 120_000, 900: 150_000}
"""Steps a second on a card, by learners at once."""
_ASKED = re.compile(r"<!-- benchmark: ([a-z_]+) -->")


def on_page_markdown(markdown, **_):
    filled = _ASKED.sub(lambda asked: benchmark(asked[1]), markdown)
    filled = filled.replace("<!-- federated episodes -->", episodes())
    filled = filled.replace("<!-- steps hoped for -->", hoped(steps_measured()))
    filled = filled.replace("<!-- microseconds of steps -->", steps(steps_measured()))
    filled = filled.replace("<!-- kernels of steps -->", kernels())
    return filled.replace("<!-- seconds of studies -->", seconds())


def benchmark(name):
    """What a benchmark wrote, without its title."""
    text = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text()
    return text.partition("\n")[2].strip()


def steps_measured():
    """Steps a second on a card, by learners at once."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())["rows"]
    return {int(row["learners"]): row["ours"]["median"] for row in rows}


def hoped(rates):
    """What was hoped for, and which numbers of learners stay below."""
    below = [learners for learners, rate in rates.items() if rate < HOPED[learners]]
    wanted = listed([HOPED[learners] / 1000 for learners in rates])
    outcome = f"{listed(below)} learners stay below" if below else "all were reached"
    return f"{wanted} thousand steps a second were hoped for: {outcome}"


def steps(rates):
    """How long one step of all learners takes on a card."""
    times = listed([1e6 * learners / rate for learners, rate in rates.items()])
    return f"A step takes {times} µs for {listed(list(rates))} learners"


def listed(numbers):
    """Numbers as a sentence lists them.

    >>> listed([1, 20.4, 3000])
    '1, 20 and 3,000'
    """
    shown = [f"{number:,.0f}" for number in numbers]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]


def kernels():
    """What a card does in a step, where that was counted."""
    name = "gpu_kernels"
    counted = (ROOT / "benchmarks" / "results" / f"{name}.md").exists()
    return (
        f"`--kernels` counts what the card does in a step:\n\n{benchmark(name)}" if counted else ""
    )


def episodes():
    """Seconds of a federated episode on a card, beside what its bandwidth allows."""
    found = json.loads((ROOT / "benchmarks" / "results" / "federated_gpu.json").read_text())
    limit = found["bandwidth_seconds"]
    rows = [
        f"| {row['episodes_at_once']} | {row['seconds_an_episode']:.3f} | "
        f"{row['seconds_an_episode'] / limit:.1f} |"
        for row in found["measured"]
    ]
    head = f"episodes at once | seconds an episode | times the bandwidth's limit of {limit:.3f}"
    about = f"{found['device']}, {found['precision']}, jax {found['jax']}"
    return "\n".join([f"| {head} |", "|---|---|---|", *rows, "", f"- {about}"])


def seconds():
    """How long each study took at full size, and where."""
    rows = ["| study | seconds | on |", "|---|---|---|"]
    for path in sorted((ROOT / "docs" / "results").glob("*/study.json")):
        about = json.loads(path.read_text())
        if "computing" in about:
            device, name = about["device"].partition(": ")[2], path.parent.name
            rows.append(f"| [{name}](studies/{name}.md) | {about['seconds']:.0f} | {device} |")
    whole = ROOT / "docs" / "results" / "all.json"
    if whole.exists():
        about = json.loads(whole.read_text())
        rows.append(f"| all, `{about['command']}` | {about['seconds']:.0f} | {about['device']} |")
    return "\n".join(rows)
