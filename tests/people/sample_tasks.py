"""Tasks that workers import, for test_tasks.py."""

import os
import signal

import subetha


@subetha.task
def add(a, b=0):
    return a + b


@subetha.task(name="custom name", priority=0, timeout=30, max_attempts=2)
def pid():
    return os.getpid()


@subetha.task(at_most_once=True)
def die():
    os.kill(os.getpid(), signal.SIGKILL)


@subetha.task
def fibonacci(n):
    if n < 2:
        return n
    one, two = fibonacci.submit(n - 1), fibonacci.submit(n - 2)
    return one.result() + two.result()


class Holder:
    @staticmethod
    @subetha.task
    def twice(x):
        return 2 * x
