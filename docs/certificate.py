"""Draws docs/assets/certificate.png and writes its numbers beside it: python docs/certificate.py."""

from pathlib import Path

import numpy as np

from apportion.certify.certificate import Gains

FILE = Path(__file__).parent / "assets" / "certificate"

shadow = np.random.default_rng(0).normal(0.01, 0.03, 800)
gains = Gains.within(shadow, 0.1, baseline="the old rule", period="day", unit="a day's demand")
certificate = gains.certify(alpha=0.05)

if __name__ == "__main__":
    certificate.plot().savefig(FILE.with_suffix(".png"), dpi=100)
    certificate.to_frame().round(6).to_csv(FILE.with_suffix(".csv"), index=False)
