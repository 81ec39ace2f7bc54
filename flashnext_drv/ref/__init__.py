"""FP64 references, rounding-point models and bit oracles of the arithmetic orders.

Modules: rounding (the switch exact | contract), orders (bits of fp32 fma, trees, Hadamard, mma), exl3 (codecs
and linears), glue, gdn, attn, moe, token (one family each), model (the whole text model with incremental
state). Callers: check/ and the tests.  Nothing here reads the kernels' code or model/pack.py: an error there
must show here.
"""
