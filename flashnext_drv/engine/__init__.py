"""Ranks, rounds and the public engine."""
