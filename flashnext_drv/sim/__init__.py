"""The CPU simulator: a libcuda.so.1 built from the kernel sources, loaded before the binding looks for a
driver."""
