"""apportion: learn to share out a resource over time."""
