"""The step inside models: transformers, engines' entries, an MLA layer, a decode stack."""
