"""The driver layer: one noun a module, and `api` as the only way to the driver."""
