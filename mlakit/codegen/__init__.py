"""Kernels compiled for cards that are not here, read, and (AMD's) executed on numpy."""
