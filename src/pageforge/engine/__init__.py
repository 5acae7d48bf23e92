"""The engine: many requests at once, batched continuously on one pool."""
