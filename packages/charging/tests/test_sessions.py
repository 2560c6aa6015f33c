"""Files of sessions: values are kept, and each mistake is reported in one sentence."""

import json
import re

import numpy as np
import pandas as pd
import pytest

from apportion.errors import InputError
from apportion_charging.sessions import (
    _EMBEDDED,
    _LAYOUT,
    fingerprint,
    inspect_sessions,
    read_sessions,
)
from apportion_charging.site import describe_sites

HEAD = ",".join(_LAYOUT)
GOOD = "here,a,2019-05-01 08:00,2019-05-01 10:00,2019-05-01 11:00,20,5"


def written(tmp_path, *lines, head=HEAD):
    path = tmp_path / "sessions.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def refused(path, **options):
    with pytest.raises(InputError) as error:
        read_sessions(path, **options)
    return str(error.value).split("\n")


def test_the_embedded_sessions_are_whole_attributed_and_their_oddities_noted():
    checked = inspect_sessions()
    frame = checked.frame
    stations = frame.groupby("site", observed=True).station.nunique().to_dict()
    assert stations == {"caltech": 54, "jpl": 52}
    assert str(frame.arrival.dtype) == "datetime64[s]"
    assert frame.stated_departure.isna().mean() == pytest.approx(0.074, abs=0.001)
    assert "CC BY 4.0" in (_EMBEDDED.parent / "ATTRIBUTION.md").read_text()
    said = checked.summary()
    assert "valid: embedded sessions: 23,449 sessions, 2019-05-01 to 2021-08-31" in said
    assert "before the one at its station has left in 1 session, first at row 22280" in said
    assert len(checked.notes) == 2
    assert checked.to_json()["sessions"]["fingerprint"] == fingerprint(frame)
    # Each call returns its own table.
    own = read_sessions()
    own.loc[0, "delivered_kwh"] = -1
    assert read_sessions().delivered_kwh.min() > 0


def test_csv_and_parquet_give_the_same_table(tmp_path):
    frame = read_sessions().head(200)
    frame.to_csv(tmp_path / "s.csv", index=False)
    frame.to_parquet(tmp_path / "s.parquet")
    for name in ("s.csv", "s.parquet"):
        table = read_sessions(tmp_path / name)
        assert fingerprint(table) == fingerprint(frame)
        assert table.dtypes.astype(str).to_dict() == frame.dtypes.astype(str).to_dict()


def test_columns_of_other_names_are_mapped(tmp_path):
    theirs = HEAD.replace("arrival", "Start").replace("delivered_kwh", "Energy, taken (kWh)")
    quoted = theirs.replace("Energy, taken (kWh)", '"Energy, taken (kWh)"')
    path = written(tmp_path, GOOD, head=quoted)
    sound = fingerprint(read_sessions(written(tmp_path / "..", GOOD)))
    together = ["arrival=Start,delivered_kwh=Energy, taken (kWh)"]
    for columns in (together, ["arrival=Start", "delivered_kwh = Energy, taken (kWh)"]):
        checked = inspect_sessions(path, columns=columns)
        assert fingerprint(checked.frame) == sound
        assert checked.notes == []
    # `columns` overrides the file's names; a column that had such a name is left out.
    swapped = ["arrival=departure", "departure=stated_departure"]
    frame = read_sessions(written(tmp_path, GOOD), columns=swapped)
    assert (frame.arrival[0].hour, frame.departure[0].hour) == (10, 11)
    assert frame.stated_departure.isna().all()
    assert "--columns arrival=THEIRS" in refused(written(tmp_path, GOOD, head=quoted))[0]


def test_names_stay_text_and_blank_lines_and_a_byte_order_mark_do_no_harm(tmp_path):
    rows = [GOOD.replace(",a,", f",{name},") for name in ("000001", "NA", "1e5", "nan")]
    path = tmp_path / "s.csv"
    path.write_text("\n\n".join([HEAD, *rows, ""]), encoding="utf-8-sig")
    assert set(read_sessions(path).station) == {"000001", "NA", "1e5", "nan"}
    numbers = pd.read_csv(written(tmp_path, GOOD)).assign(station=[17])
    numbers.to_parquet(tmp_path / "numbers.parquet")
    assert read_sessions(tmp_path / "numbers.parquet").station.tolist() == ["17"]


BAD = {
    "here,a,2019-05-01 08:00,2019-05-01 07:00,,,5": '"departure" is before "arrival"',
    "here,a,2019-05-02 08:00,2019-05-02 09:00,,-1,5": 'column "requested_kwh" is negative or infinite',
    "here,a,2019-05-02 08:00,2019-05-02 09:00,,,five": 'column "delivered_kwh" is not a number',
    "here,a,05/02/2019 8am,2019-05-02 09:00,,,5": 'column "arrival" is no time',
    "here,,2019-05-02 08:00,2019-05-02 09:00,,,5": 'column "station" is empty',
}


def test_everything_that_is_wrong_is_said_at_once_with_the_line_that_mends_it(tmp_path):
    path = written(tmp_path, GOOD, *BAD)
    sentences = refused(path)
    expected = {
        f"{path}: {what} in 1 session, first at line {place}"
        for place, what in enumerate(BAD.values(), 3)
    }
    assert {re.split(r";| \(", sentence)[0] for sentence in sentences} == expected
    assert any('("five"); write energy in kWh as 12.5' in s for s in sentences)
    assert any('frame["arrival"] = pd.to_datetime(frame["arrival"])' in s for s in sentences)
    missing = refused(written(tmp_path, "1,2", head="site,where"))
    needed = ["station", "arrival", "departure", "delivered_kwh"]
    assert [s.split('"')[1] for s in missing] == needed
    assert all("the columns found are site, where" in s for s in missing)


def test_odd_sessions_are_noted_and_used(tmp_path):
    odd = {
        "here,a,2019-05-01 09:00,2019-05-01 11:00,,,5": "before the one at its station has left in 1",
        "here,c,2019-05-01 09:00,2019-05-01 10:00,,,500": "more was taken than 400 kW gives in 1",
    }
    checked = inspect_sessions(written(tmp_path, GOOD, *odd))
    assert len(checked.frame) == len(odd) + 1
    assert len(checked.notes) == len(odd)
    for place, note in enumerate(odd.values()):
        assert any(note in said and f"line {place + 3}" in said for said in checked.notes)


def test_unknown_columns_are_named_and_rates_are_read(tmp_path):
    rows = [f"{GOOD},7.4,x", f"{GOOD.replace(',a,', ',b,')},,y"]
    checked = inspect_sessions(written(tmp_path, *rows, head=f"{HEAD},max_kw,colour"))
    assert checked.frame.max_kw.tolist() == pytest.approx([7.4, np.nan], nan_ok=True)
    assert checked.notes == [f"{checked.source}: not used: colour"]
    assert fingerprint(checked.frame) != fingerprint(checked.frame.drop(columns="max_kw"))
    [note] = inspect_sessions(written(tmp_path, f"{GOOD},7.4", head=f"{HEAD},max_kwh")).notes
    assert note.endswith("not used: max_kwh; did you mean max_kw?")


def acn_row(**changes):
    inputs = [
        {"kWhRequested": 25.6, "requestedDeparture": "Wed, 25 Apr 2018 22:00:00 GMT"},
        {"kWhRequested": 5.0, "requestedDeparture": "Wed, 25 Apr 2018 18:00:00 GMT"},
    ]
    return {
        "connectionTime": "Wed, 25 Apr 2018 15:08:04 GMT",
        "disconnectTime": "Wed, 25 Apr 2018 23:20:10 GMT",
        "kWhDelivered": 7.932,
        "siteID": "0002",
        "spaceID": "CA-496",
        "stationID": "2-39-78-362",
        "timezone": "America/Los_Angeles",
        "userInputs": inputs,
        **changes,
    }


@pytest.mark.parametrize("dump", [json.dumps, str])
def test_acn_data_is_understood_as_it_comes(tmp_path, dump):
    rows = [acn_row(), acn_row(userInputs=None, connectionTime="Thu, 26 Apr 2018 05:00:00 GMT")]
    rows[1]["disconnectTime"] = "Thu, 26 Apr 2018 09:00:00 GMT"
    frame = pd.DataFrame(rows)
    frame["userInputs"] = [None if x is None else dump(x) for x in frame.userInputs]
    frame.to_csv(tmp_path / "acn.csv", index=False)
    table = read_sessions(tmp_path / "acn.csv")
    first, second = table.itertuples(index=False)
    assert (first.site, first.station) == ("0002", "CA-496")
    zone = "America/Los_Angeles"
    assert str(table.arrival.dt.tz) == zone
    assert first.arrival == pd.Timestamp("2018-04-25 08:08:04", tz=zone)
    assert first.departure == pd.Timestamp("2018-04-25 16:20:10", tz=zone)
    # The first statement counts: later changes were not known on arrival.
    assert first.stated_departure == pd.Timestamp("2018-04-25 15:00:00", tz=zone)
    assert first.requested_kwh == 25.6
    assert second.arrival == pd.Timestamp("2018-04-25 22:00:00", tz=zone)
    assert np.isnan(second.requested_kwh)


def test_times_with_zones_are_converted_once_it_is_said_which_one_is_local(tmp_path):
    rows = [
        "here,a,2019-05-01T15:00:00+00:00,2019-05-01T17:00:00Z,,,5",
        "here,a,2019-12-01T08:00:00-08:00,2019-12-01 10:00:00-08,,,5",
    ]
    path = written(tmp_path, *rows)
    (sentence,) = refused(path)
    assert "times carry a zone, and the garage's zone is unknown; give" in sentence
    assert "dt.tz_convert(ZONE).dt.tz_localize(None)" in sentence
    utc = pd.DataFrame({"station": ["a"], "delivered_kwh": [5.0]})
    utc["arrival"] = pd.to_datetime(["2019-05-01 15:00"]).tz_localize("UTC")
    utc["departure"] = utc.arrival + pd.Timedelta(hours=2)
    utc.to_parquet(tmp_path / "s.parquet")
    for file in (path, tmp_path / "s.parquet"):
        table = read_sessions(file, timezone="America/Los_Angeles")
        assert set(table.arrival.dt.hour) == {8}
        assert set(table.departure.dt.hour) == {10}
        assert str(table.stated_departure.dt.tz) == "America/Los_Angeles"
        assert describe_sites(table)["here" if file == path else "garage"].timezone is not None


def test_two_zones_at_once_are_refused(tmp_path):
    rows = [f"{GOOD},America/Los_Angeles", f"{GOOD},Europe/Rome"]
    sentence, *_ = refused(written(tmp_path, *rows, head=f"{HEAD},timezone"))
    assert "names 2 zones, first America/Los_Angeles, Europe/Rome" in sentence


@pytest.mark.parametrize(
    "text",
    ["20190304T085300-0800", "20190304T165300Z", "2019-03-04T08:53-08", "20190304T0853-0800"],
)
def test_compact_times_are_read_by_their_zone(text, tmp_path):
    row = GOOD.replace("2019-05-01 08:00", text)
    later = "20190304T1200-0800"
    row = row.replace("2019-05-01 10:00", later).replace("2019-05-01 11:00", later)
    path = written(tmp_path, row)
    [told] = refused(path)
    assert "times carry a zone" in told
    frame = read_sessions(path, timezone="America/Los_Angeles")
    assert frame.arrival[0] == pd.Timestamp("2019-03-04 08:53", tz="America/Los_Angeles")
    # The usual zone is used if the file has none; a given time zone overrides it.
    assert read_sessions(path, usual_zone="Europe/Berlin").arrival[0].hour == 17
    told = read_sessions(path, usual_zone="Europe/Berlin", timezone="America/Los_Angeles")
    assert told.arrival[0].hour == 8
    # Times without a zone are the garage's local time.
    plain = read_sessions(written(tmp_path, GOOD.replace("-05-01 ", "0501T").replace(":00", "00")))
    assert fingerprint(plain) == fingerprint(read_sessions(written(tmp_path, GOOD)))
