"""Flower strategies: learned aggregation, and shares by gradient descent."""

from apportion.bridges.flower.strategy import LearnedAggregation as LearnedAggregation
from apportion.bridges.flower.strategy import ShareGradient as ShareGradient
