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
        ("aggregator-training", aggregator_training),
        ("flower", flower),
        ("flower-memory", flower_memory),
        ("blind", blind),
        ("blind-elsewhere", blind_elsewhere),
    ):
        markdown = markdown.replace(f"<!-- {mark} -->", table()) if mark in markdown else markdown
    return markdown


SHOWN = ("FedAvg", "FedAvgM", "nearest-neighbour mixing", "fine-tuned", "gradient shares, momentum")


def federations():
    """The study's first circumstance, kind by kind."""
    table = pd.read_csv(RESULTS / "federations" / "table.csv")
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
    """Means over kinds in every circumstance, and the policy's worst kind there.

    Where the policy was not tested, what the one before came to stands, and is called so.
    """
    table = pd.read_csv(RESULTS / "federations" / "table.csv")
    earlier = pd.read_csv(RESULTS / "federations-earlier" / "table.csv")
    earlier = earlier[~earlier["circumstance"].isin(table["circumstance"])]
    table = pd.concat(
        [table, earlier.assign(circumstance=earlier["circumstance"] + " (the policy before)")]
    )
    shown = ("FedAvg", "FedAvgM", "gradient shares, momentum", "learned")
    rows = []
    for name in dict.fromkeys(table["circumstance"]):
        own = table[table["circumstance"] == name].set_index(["kind", "method"])
        mean = own.loc["mean of kinds"]
        ours = own.xs("learned", level="method").drop(index="mean of kinds")
        worst = ours["gain"].idxmin()
        values = [_short(mean.loc[method, "final"]) for method in shown]
        rows.append(
            [name, *values, _study_gain(mean.loc["learned"]), worst, _study_gain(ours.loc[worst])]
        )
    heads = ["", *shown[:-1], "the policy", "over FedAvg", "worst kind", "there"]
    return "\n".join(_markdown(heads, rows))


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


def _study_gain(row):
    return f"{row['gain']:+.3f} [{row['gain low']:.3f}, {row['gain high']:.3f}]"


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
