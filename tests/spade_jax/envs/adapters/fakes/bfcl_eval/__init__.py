"""Stands in for bfcl-eval."""
