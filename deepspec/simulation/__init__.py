"""Serving, simulated: continuous batching from a measured profile and recorded acceptance."""
