"""Checks of kernels against their declarations, references and bytes."""
