"""Packs on disk and in memory: configuration, tensors, manifest, synthetic packs."""
