"""Run configurations, shipped with the package."""
