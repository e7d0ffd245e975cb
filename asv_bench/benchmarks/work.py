"""What the worker processes of the benchmarks import: a handler and a task."""

import subetha

ECHO = 1

subetha.register(ECHO, bytes)


@subetha.task
def negated(n):
    return -n


@subetha.task
def added(a, b):
    return a + b
