"""Learned aggregation as a Flower strategy."""

from apportion.bridges.flower.strategy import LearnedAggregation as LearnedAggregation
