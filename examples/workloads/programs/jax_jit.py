#!/usr/bin/env python3
"""Tests JAX: jit and grad, with the pool that JAX allocates at its start (75 % of the memory)."""

from __future__ import annotations

import os

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
os.environ.setdefault("JAX_PLATFORMS", "cuda")

import jax
import jax.numpy as jnp
from driver_api import Cuda
from program import ProgramCheck, run

STEPS = 30


def loss(parameters: dict, x: jax.Array, wanted: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ parameters["first"])
    return jnp.mean((hidden @ parameters["second"] - wanted) ** 2)


@jax.jit
def step(parameters: dict, x: jax.Array, wanted: jax.Array) -> tuple[dict, jax.Array]:
    value, gradients = jax.value_and_grad(loss)(parameters, x, wanted)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), value


def body(program: ProgramCheck) -> None:
    keys = jax.random.split(jax.random.key(8), 4)
    parameters = {
        "first": jax.random.normal(keys[0], (64, 128)) * 0.1,
        "second": jax.random.normal(keys[1], (128, 8)) * 0.1,
    }
    x, wanted = jax.random.normal(keys[2], (256, 64)), jax.random.normal(keys[3], (256, 8))
    losses = []
    for _ in range(STEPS):
        parameters, value = step(parameters, x, wanted)
        losses.append(float(value))
    program.check("the loss falls", losses[-1] < losses[0], losses)
    program.value("losses", losses, 1e-2)
    device = jax.devices()[0]
    program.check("it runs on the GPU", device.platform == "gpu", device)
    pool = (device.memory_stats() or {}).get("bytes_limit", 0)
    total = Cuda().total_memory()
    program.note("bytes of the pool", pool)
    program.check(
        "the pool is three quarters of total memory", 0.6 < pool / total <= 0.76, (pool, total)
    )
    program.check(
        "total memory equals the quota", not program.governed or total == program.quota, total
    )
    program.launches = STEPS


if __name__ == "__main__":
    run(body)
