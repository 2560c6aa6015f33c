"""The figures and claims of the paper, and studies of our own, run by `apportion study`."""
