"""Learned aggregation as a Flower strategy, and shares by gradient beside it."""

from apportion.bridges.flower.strategy import LearnedAggregation as LearnedAggregation

from apportion.bridges.flower.gradient import ShareGradient as ShareGradient  # isort: skip
