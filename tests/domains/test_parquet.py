"""A Parquet file whose text is none is refused where it is read, not where the text is first used."""

import pandas as pd
import pytest

from apportion.domains.portfolio.prices import load_prices
from apportion.errors import InputError
from apportion_charging.sessions import read_sessions


@pytest.mark.parametrize("read", [load_prices, read_sessions])
def test_text_that_cannot_be_decoded_is_refused(read, tmp_path):
    path = tmp_path / "table.parquet"
    frame = pd.DataFrame(
        {"ticker": ["A~A~", "B~B~"], "site": ["north", "south"], "close": [1.0, 2.0]}
    )
    frame.to_parquet(path, compression="none", use_dictionary=False)
    content = path.read_bytes()
    assert b"A~A~" in content
    path.write_bytes(content.replace(b"A~A~", b"\xff\xfeA~"))
    with pytest.raises(InputError, match=r"table\.parquet: cannot be read \(.*UTF8"):
        read(path)
