"""Continuous batching: many requests on one pool."""
