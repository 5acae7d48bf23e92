"""Benchmarks: one file a question, with the physics beside every figure."""
