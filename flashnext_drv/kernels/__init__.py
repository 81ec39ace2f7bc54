"""Kernel declarations, the catalog over them, and the launcher that binds them to a device."""
