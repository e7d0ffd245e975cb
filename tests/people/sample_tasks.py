"""Tasks that workers import, for test_tasks.py."""

import os
import signal
import threading
import time

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


def _count(path):
    """How often this was called with the path, this time included."""
    with open(path, "a+") as file:
        file.write("x")
        file.seek(0)
        return len(file.read())


@subetha.task(retry_on=(OSError, ValueError), max_attempts=4)
def flaky(path, failures):
    number = _count(path)
    if number <= failures:
        raise OSError(f"failure {number}")
    return number


@subetha.task(retry_on=Exception)
def give_lock(path):
    _count(path)
    return threading.Lock()


@subetha.task(backoff=3600, max_attempts=2)
def dies_once(path):
    if _count(path) == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@subetha.task(queue_name="mail")
def send():
    return os.getpid()


@subetha.task
def add_elsewhere(a, b):
    return add.options(queue_name="images").submit(a, b).result()


def elsewhere(task):
    """In a job whose worker has not been told to import this module."""
    return task.submit().result()


@subetha.task(max_concurrency=1)
def alone(path, seconds=0.0):
    """How many of them ran when this one did, itself included."""
    with open(path, "a+") as file:
        file.write("+")
        file.flush()
        file.seek(0)
        text = file.read()
        time.sleep(seconds)
        file.write("-")
    return text.count("+") - text.count("-")
