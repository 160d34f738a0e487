"""Safe road or idea: an environment with built-in forgetting, and the arms that are compared on it.

python -m benchmarks.studies.forgetting
"""
