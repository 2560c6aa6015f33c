"""Charging cars behind one feeder: share its power out among those that are plugged in."""
