"""The policy that comes with the package: trained on every kind of federation, kilobytes.

It is what `apportion train federated` makes; docs/tutorials/flower.md has its card.
"""

from functools import cache
from pathlib import Path

from apportion.domains.federated.policy import AggregationPolicy
from apportion.runs.policy_file import load_policy

FOLDER = Path(__file__).parent / "policy_files"


@cache
def shipped_policy() -> AggregationPolicy:
    """The shipped policy, for the state `invariant` over five rounds."""
    policy = load_policy(FOLDER)
    assert isinstance(policy, AggregationPolicy)
    return policy
