"""Learned aggregation as a Flower strategy, and shares by gradient beside it."""

from apportion.bridges.flower.strategy import LearnedAggregation as LearnedAggregation
from apportion.bridges.flower.strategy import ShareGradient as ShareGradient
