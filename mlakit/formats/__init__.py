"""FP8 and MXFP4 in torch operators: what kernels that quantise are held against."""
