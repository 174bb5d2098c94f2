"""Stands in for rlve-gym."""
