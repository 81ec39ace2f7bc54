"""Measured numbers and the receipts that keep them tied to sources, images, device and date."""
