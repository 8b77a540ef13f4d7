"""Many cells: the grid, warm workers, Parquet parts, and what is built from rows."""
