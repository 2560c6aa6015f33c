"""Tables of federations on the pages, filled from what benchmarks wrote to docs/results."""

import json
from pathlib import Path

import pandas as pd

from apportion.statistics import Estimate, compare

RESULTS = Path(__file__).parent / "results"
FLOWER, BLIND = RESULTS / "flower", RESULTS / "blind"
OURS = "LearnedAggregation, 200 samples"


def on_page_markdown(markdown, **_):
    for mark, table in (
        ("federations", federations),
        ("federations-elsewhere", federations_elsewhere),
        ("federations-below", federations_below),
        ("federations-attacked", federations_attacked),
        ("aggregator-training", aggregator_training),
        ("flower", flower),
        ("flower-memory", flower_memory),
        ("blind", blind),
        ("blind-elsewhere", blind_elsewhere),
    ):
        markdown = markdown.replace(f"<!-- {mark} -->", table()) if mark in markdown else markdown
    return markdown


RIVALS = ("FedAvg", "FedAvgM", "gradient shares, momentum")
SHOWN = ("FedAvg", "FedAvgM", "nearest-neighbour mixing", "fine-tuned", "gradient shares, momentum")


def federations():
    """The study's first circumstance, kind by kind."""
    table, _ = _study()
    own = table[table["circumstance"] == table["circumstance"].iloc[0]]
    found = {(row["kind"], row["method"]): row for row in own.to_dict("records")}
    rows = []
    for kind in dict.fromkeys(own["kind"]):
        ours = found[kind, "learned"]
        values = [_short(found[kind, name]["final"]) for name in (*SHOWN, "learned")]
        rows.append(
            [f"**{kind}**" if kind == "mean of kinds" else kind, *values, _study_gain(ours)]
        )
    return "\n".join(_markdown(["", *SHOWN, "the policy", "over FedAvg"], rows))


def federations_elsewhere():
    """Means over kinds in every circumstance, and the policy's worst kind there."""
    table, verdicts = _study()
    rows = []
    for name in dict.fromkeys(table["circumstance"]):
        own = table[table["circumstance"] == name].set_index(["kind", "method"])
        mean = own.loc["mean of kinds"]
        ours = own.xs("learned", level="method").drop(index="mean of kinds")
        worst = ours["gain"].idxmin()
        values = [_short(mean.loc[method, "final"]) for method in (*RIVALS, "learned")]
        lead = verdicts[f"{name}: ahead of {RIVALS[-1]}, mean of kinds"]
        gains = [_study_gain(mean.loc["learned"]), _verdict_gain(lead)]
        rows.append([name, *values, *gains, worst, _study_gain(ours.loc[worst])])
    heads = ["", *RIVALS, "the policy", "over FedAvg", f"over {RIVALS[-1]}", "worst kind"]
    return "\n".join(_markdown([*heads, "there, over FedAvg"], rows))


def federations_below():
    """Where the policy is below FedAvg, and not by chance."""
    table, _ = _study()
    below = table[(table["method"] == "learned") & (table["gain high"] < 0)].to_dict("records")
    found = [f"{row['kind']} ({row['circumstance']}) {_study_gain(row, 4)}" for row in below]
    return "; ".join(found) or "no kind"


def federations_attacked():
    """How the policy stands to the best defence among attackers, where defences were tried."""
    _, verdicts = _study()
    mark = ": among attackers within .005 of the best defence, "
    found = [(*claim.split(mark), one) for claim, one in verdicts.items() if mark in claim]
    return "; ".join(
        f"{_verdict_gain(one)} over {defence} ({circumstance})"
        for circumstance, defence, one in found
    )


def _study():
    """The study's table, and its verdicts by what they claim."""
    folder = RESULTS / "federations"
    verdicts = json.loads((folder / "verdict.json").read_text())
    return pd.read_csv(folder / "table.csv"), {one["claim"]: one for one in verdicts}


def aggregator_training():
    """Ways to train on validation: means over seeds with many and with few samples."""
    table = pd.read_csv(RESULTS / "aggregator_training" / "table.csv")
    columns = ["accuracy", "over gradient shares", "worst over FedAvg"]
    found = table.groupby(["circumstance", "variant"], sort=False)[columns].mean()
    many, few = (found.loc[name] for name in ("200 samples", "20 samples"))
    rows = [
        [name, *(f"{part.loc[name, column]:{form}}" for part in (many, few)
                 for column, form in zip(columns, (".4f", "+.4f", "+.4f"), strict=True))]
        for name in few.index
    ]  # fmt: skip
    heads = ("{}", "{}, over gradient shares", "{}, worst kind over FedAvg")
    named = [head.format(name) for name in ("200 samples", "20 samples") for head in heads]
    return "\n".join(_markdown(["", *named], rows))


def _study_gain(row, digits=3):
    low, high = row["gain low"], row["gain high"]
    return f"{row['gain']:+.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _verdict_gain(verdict):
    low, high = verdict["interval"]
    return f"{verdict['estimate']:+.4f} [{low:.4f}, {high:.4f}]"


def flower():
    """Flower's own strategies beside ours: means over seeds, and the paired gain over FedAvg."""
    table = pd.read_csv(FLOWER / "table.csv")
    here = table[table["how"] == "in process"]
    wide = here.pivot(index=["kind", "seed"], columns="strategy", values="accuracy")
    names = list(dict.fromkeys(here["strategy"]))
    rows = []
    for kind in dict.fromkeys(here["kind"]):
        own = wide.loc[kind]
        gain = compare(own[OURS].to_numpy(), own["FedAvg"].to_numpy())
        rows.append([kind, *(_short(own[name].mean()) for name in names), _gain(gain)])
    means = wide.groupby("seed").mean()
    gain = compare(means[OURS].to_numpy(), means["FedAvg"].to_numpy())
    rows.append(["**mean**", *(_short(means[name].mean()) for name in names), _gain(gain)])
    heads = ["", *(name.replace("LearnedAggregation", "learned") for name in names)]
    about = json.loads((FLOWER / "about.json").read_text())
    simulated = table[table["how"] == "simulation"]["seed"].nunique()
    note = (
        f"Means over {len(means)} federations of each kind, and what the policy with 200 samples gains "
        f"over FedAvg. Every run is Flower's own `Strategy.start` with the example's client app; "
        f"the first{'' if simulated == 1 else f' {simulated}'} of each kind also went through Flower's "
        f"simulation ({about['runs_in_both']} runs), and their accuracies differ by "
        f"{about['largest_difference']:.3f} at most. Flower {about['versions']['flwr']}, "
        f"made by `{about['command']}`."
    )
    return "\n".join([*_markdown([*heads, "200 samples over FedAvg"], rows), "", note])


def flower_memory():
    """A sentence on what a round of large models costs."""
    found = json.loads((FLOWER / "memory.json").read_text())
    ours, plain = found["rounds"]["LearnedAggregation"], found["rounds"]["FedAvg"]
    return (
        f"With {found['clients']} replies of {found['parameters'] / 1e6:.0f} million parameters a round of "
        f"the strategy takes {ours['seconds']:.1f} s beside the {ours['seconds_predicting']:.1f} s that "
        f"`predict` needs to answer ({plain['seconds']:.1f} s for `FedAvg`, which tries no model), and "
        f"{ours['peak_bytes'] / 1e6:.0f} MB beyond the replies themselves, {ours['peak_in_models']:.1f} "
        f"times one model (`FedAvg`: {plain['peak_in_models']:.1f}): models are read where Flower has put "
        f"them, and averaged block by block. Measured by `{found['command']}` on {found['devices'][0]}, "
        "beside other work."
    )


def blind():
    """The policy without samples, kind by kind, where it was trained for."""
    table = pd.read_csv(BLIND / "table.csv")
    first = table["circumstance"].iloc[0]
    own = table[table["circumstance"] == first]
    names = list(dict.fromkeys(own["aggregator"]))
    found = {(row["kind"], row["aggregator"]): row for row in own.to_dict("records")}
    rows = []
    for kind in dict.fromkeys(own["kind"]):
        learned = found[kind, "learned"]
        gain = f"{learned['gain']:+.3f} [{learned['low']:.3f}, {learned['high']:.3f}]"
        values = [_short(found[kind, name]["accuracy"]) for name in names]
        rows.append([f"**{kind}**" if kind == "mean" else kind, *values, gain])
    return "\n".join(_markdown(["", *names, "learned over FedAvg"], rows))


def blind_elsewhere():
    """How it does in circumstances that it was not trained for, and the worst of all."""
    table = pd.read_csv(BLIND / "table.csv")
    sentences = []
    for name in dict.fromkeys(table["circumstance"]):
        own = table[table["circumstance"] == name].set_index(["aggregator", "kind"])
        ours = own.loc["learned"]
        kinds = ours.drop(index="mean")
        worst = kinds["gain"].idxmin()
        sentences.append(
            f"- {name}: {_short(ours.loc['mean', 'accuracy'])} in the mean, FedAvg "
            f"{_short(own.loc[('FedAvg', 'mean'), 'accuracy'])}, FedAvgM "
            f"{_short(own.loc[('FedAvgM', 'mean'), 'accuracy'])}; worst kind {worst}, "
            f"{kinds.loc[worst, 'gain']:+.3f} [{kinds.loc[worst, 'low']:.3f}, "
            f"{kinds.loc[worst, 'high']:.3f}]; worst single run {ours.loc['mean', 'worst run']:+.3f}."
        )
    return "\n".join(sentences)


def _short(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def _gain(gain: Estimate) -> str:
    return f"{gain.value:+.3f} [{gain.low:.3f}, {gain.high:.3f}]"


def _markdown(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]
