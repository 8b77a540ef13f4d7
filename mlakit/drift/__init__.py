"""How far outputs are from float64, whose rounding it is, and whether it matters."""
