"""The policies that come with the package: trained on every kind of federation, kilobytes.

They are of the kind that `apportion train federated` makes, with `--state blind` for servers without
samples of their own; docs/tutorials/flower.md has their cards.
"""

import hashlib
from functools import cache
from pathlib import Path

from apportion.domains.federated.policy import AggregationPolicy
from apportion.runs.policy_file import load_policy

FOLDER = Path(__file__).parent / "policy_files"


@cache
def shipped_policy() -> AggregationPolicy:
    """The shipped policy, for the state `invariant` over five rounds."""
    return _load(FOLDER)


def shipped_fingerprint() -> str:
    """A short digest of the shipped policy, to tell results of one from those of another."""
    return hashlib.sha256((FOLDER / "policy.safetensors").read_bytes()).hexdigest()[:16]


@cache
def shipped_blind_policy() -> AggregationPolicy:
    """The one for servers without samples, for the state `blind` over five rounds."""
    return _load(FOLDER / "blind")


def _load(folder: Path) -> AggregationPolicy:
    policy = load_policy(folder)
    assert isinstance(policy, AggregationPolicy)
    return policy
