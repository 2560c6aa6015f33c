"""Electric-vehicle charging: share a feeder's power among the cars that are plugged in."""
