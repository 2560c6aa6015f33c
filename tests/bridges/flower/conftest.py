"""The clients of a simulation are a module that its workers import, with no tests of its own."""

collect_ignore = ["faulty_clients.py", "small_federation.py"]
