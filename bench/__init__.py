"""Rollyard's benchmarks: one module per benchmark, run as `rollyard bench NAME` from a checkout.

A benchmark NAME is a module with `async def bench_NAME(*, quick, peers, …)`, which returns metrics and versus. `report`
runs and prints them. The drivers of the peers, other projects that are measured in the same run, are in `peers/`.
"""
