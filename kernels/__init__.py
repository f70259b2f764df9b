"""Tensors in, tensors out: one operation a file, a Triton kernel beside its torch reference.

Import-light on purpose: `transformers` imports a package of this name when it finds one, and must survive
finding this one.
"""
