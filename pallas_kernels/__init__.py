"""Kernels by operation: each folder has an `api`, a `reference` in jnp, and implementations in Pallas or C++."""
