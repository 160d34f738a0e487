"""Prefect flows and the command line: the only package that knows both `rrl_core` and `storage`."""
