"""AMD's instruction sets on numpy: text to instructions, and what each instruction does.

Written from AMD's public ISA manuals and LLVM's AMDGPU guide; each family names its section:

* CDNA2, CDNA3, CDNA4: "AMD Instinct MI200 / MI300 / CDNA4 Instruction Set Architecture"
* RDNA3, RDNA4: "RDNA3 / RDNA4 Instruction Set Architecture Reference Guide"
* LLVM: "User Guide for AMDGPU Backend" (kernel descriptor, initial registers, gfx1250)

A value instruction is a line of ``alu.OPS`` (``scalar.ALU``); any other is a function of
``(waves, instruction)``, named in the ``FAMILIES`` at the end of its module.

All lanes of all waves at one program counter step at once: a vector register is a numpy array of
shape (waves, lanes), a scalar register one of shape (waves,). Reciprocal, square root and their
like are rounded correctly here, where hardware may differ by one ulp.
"""
