"""Verdicts between runs, and what is handed on: reports, history, contributions."""
