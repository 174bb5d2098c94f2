"""Stands in for gem."""
