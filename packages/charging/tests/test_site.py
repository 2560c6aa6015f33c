"""The description of a garage: reading, clear refusals, writing, and limits as one matrix."""

import numpy as np
import pandas as pd
import pytest

from apportion.errors import InputError
from apportion_charging.site import Branch, Site, Station, describe_sites, embedded_site, saved_site

TEXT = """
timezone = "Europe/Berlin"
volts = 230
feeder_a = 63
period_minutes = 5

[stations.N1]
max_a = 32

[stations."N 2"]
max_a = 16
phases = 1
phase = 2
min_a = 8

[branches.north]
limit_a = 20
stations = ["N1", "N 2"]
"""
SITE = Site(
    {"N1": Station(32.0, (1, 2, 3)), "N 2": Station(16.0, (2,), 8.0)},
    feeder_a=63.0,
    branches={"north": Branch(20.0, ("N1", "N 2"))},
    timezone="Europe/Berlin",
    period_minutes=5,
)


def read(tmp_path, text: str) -> Site:
    file = tmp_path / "site.toml"
    file.write_text(text)
    return Site.read(file)


def test_a_file_is_read_and_what_is_written_is_read_again(tmp_path):
    assert read(tmp_path, TEXT) == SITE
    for site in (SITE, embedded_site("jpl"), Site({'a "b"': Station()}, feeder_kw=5)):
        again = read(tmp_path, site.to_toml())
        assert (again, again.fingerprint) == (site, site.fingerprint)
    turned = Site(dict(reversed(SITE.stations.items())), 63.0, branches=SITE.branches,
                  timezone="Europe/Berlin", period_minutes=5)  # fmt: skip
    assert turned.fingerprint == SITE.fingerprint
    assert Site({"N1": Station()}, feeder_a=63.0).fingerprint != SITE.fingerprint


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("feeder_a", "feeder", "there is no 'feeder'; did you mean"),
        ("limit_a = 20", "limit = 20", "branch north: there is no 'limit'"),
        (
            "limit_a = 20",
            "limit_a = -1",
            "branch north: limit_a is -1; it must be a number above 0",
        ),
        ("max_a = 32", 'max_a = "32"', "station N1: max_a is '32'; it must be a number"),
        ("max_a = 32", "max_a = 5", "min_a 6 is above max_a 5"),
        ('["N1", "N 2"]', '["N3"]', "branch north: there is no station N3"),
        ('["N1", "N 2"]', '"N1"', "give limit_a and a list of stations"),
        ("volts = 230", "feeder_kw = 40", "give one of feeder_a"),
        ("Europe/Berlin", "Berlin", "no such time zone as 'Berlin'"),
        ("period_minutes = 5", "period_minutes = 7", "it must be 5 or 15"),
        ("phases = 1", "phases = 2", "phases must be 1 or 3"),
        ("phase = 2", "phase = 4", "1, 2 or 3"),
        ("phases = 1", "phases = 3", "of a station of one"),
        ("[stations.N1]", "[other]", "there is no 'other'"),
        ("volts = 230", "volts = ", "site.toml"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(old, new, said, tmp_path):
    with pytest.raises(InputError) as caught:
        read(tmp_path, TEXT.replace(old, new, 1))
    text = str(caught.value)
    assert said in text
    assert "site.toml" in text
    assert len(text.splitlines()) == 1


def test_stations_are_tables_and_some_must_be_there(tmp_path):
    for text, said in (
        ("feeder_a = 5\nstations = 3", "must be tables"),
        ("feeder_a = 5\n[stations]\nN1 = 3", "must be tables"),
        ("feeder_a = 5", "no station is described"),
    ):
        with pytest.raises(InputError, match=said):
            read(tmp_path, text)
    with pytest.raises(InputError, match="phases must be among"):
        Site({"N1": Station(phases=())}, feeder_a=5)


def test_limits_are_rows_of_one_matrix():
    """By hand: a 63 A feeder, three phases of 230 V; the second station has only phase 2."""
    wiring = SITE.wiring()
    assert SITE.capacity_kw == pytest.approx(63 * 3 * 0.23)
    assert wiring.max_kw == pytest.approx([32 * 0.69, 16 * 0.23])
    assert wiring.min_a.tolist() == [6, 8]
    power, *phases = wiring.load.tolist()
    assert power == pytest.approx([0.69, 0.23])
    assert phases == [[1, 0], [1, 1], [1, 0]] * 2
    assert wiring.limit == pytest.approx([63 * 0.69, 63, 63, 63, 20, 20, 20])
    one_phase = Site({"a": Station(phases=(2,)), "b": Station(phases=(2,))}, feeder_a=40.0)
    assert one_phase.capacity_kw == pytest.approx(40 * 0.23)
    assert Site({"a": Station()}, feeder_kw=9.0).wiring().limit.tolist() == [9.0]


def sessions(power: dict[str, float], site: str = "here") -> pd.DataFrame:
    start = pd.Timestamp("2021-06-01 08:00")
    return pd.DataFrame(
        {
            "site": site,
            "station": list(power),
            "arrival": start,
            "departure": start + pd.Timedelta(hours=2),
            "delivered_kwh": [2 * kw for kw in power.values()],
        }
    )


def test_cables_are_inferred_from_the_power_seen():
    seen = {"a": 3.0, "b": 7.0, "c": 10.0, "d": 21.0, "e": 99.0, "f": 0.0}
    site = Site.infer(sessions(seen), timezone="Europe/Berlin")
    kw = dict(zip(site.stations, np.round(site.wiring().max_kw, 2), strict=True))
    assert kw == {"a": 3.68, "b": 7.36, "c": 11.04, "d": 22.08, "e": 22.08, "f": 3.68}
    assert site.capacity_kw == pytest.approx(sum(kw.values()), abs=0.01)
    assert site.timezone == "Europe/Berlin"
    assert "6 stations (2 of 3.7 kW, 1 of 7.4 kW" in site.describe()


def test_sites_are_described_by_files_by_name_or_by_what_is_seen(tmp_path):
    file = tmp_path / "north.toml"
    file.write_text(TEXT)
    frame = pd.concat([sessions({"N1": 5.0}, "north"), sessions({"S": 5.0}, "south")])
    found = describe_sites(frame, [str(file), "south"])
    assert found["north"] == SITE
    assert list(found["south"].stations) == ["S"]
    with pytest.raises(InputError, match="the sites are north, south"):
        describe_sites(frame, ["west"])
    saved = {"sites": {"north": SITE.to_toml(), "south": found["south"].to_toml()}}
    assert saved_site(saved, "north") == saved_site({}, str(file)) == SITE
    for chosen, said in ((None, "trained on 2 sites"), ("nort", "did you mean")):
        with pytest.raises(InputError, match=said):
            saved_site(saved, chosen)
    with pytest.raises(InputError, match="describe no site"):
        saved_site({}, None)
