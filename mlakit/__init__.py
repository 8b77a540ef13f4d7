"""mlakit: which kernel path should run the QK RMSNorm step of MLA here, and is it worth it."""

__version__ = "0.1.0"
