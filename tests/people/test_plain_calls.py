"""The short layouts of calls of named functions with plain arguments: what goes that way, and comes out the same."""

import operator
import os.path
import sys
import types

import pytest

from subetha import calls
from subetha._core import decode_plain, encode_plain, is_plain
from subetha.errors import CallFailed

NAMED, PLAIN, PICKLED = 2, 3, 0x80


class Text(str):
    pass


def two(a, b):
    return a, b


@pytest.mark.parametrize(
    "args", [(), (5,), (-(2**200), 1.5, 2j, True, None), ("text", "\ud800", "__main__"), tuple(range(300))]
)
@pytest.mark.parametrize("function", [operator.neg, two, os.path.join, int], ids=lambda f: f.__name__)
def test_a_named_function_with_plain_arguments_comes_out_as_it_went_in(function, args):
    data = calls.encode_call(function, args, {})
    assert data[0] == NAMED
    assert decode_plain(None, data) == (function, args)
    assert decode_plain(None, memoryview(data)) == (function, args)


def test_a_task_needs_no_name():
    data = calls.encode_call(None, (1, "a"), {})
    assert data[0] == PLAIN
    assert decode_plain(two, data) == (two, (1, "a"))


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (operator.neg, ([],), {}),
        (operator.neg, (Text("x"),), {}),
        (operator.neg, (b"bytes",), {}),
        (operator.neg, ((1, 2),), {}),
        (two, (1,), {"b": 2}),
        ([].append, (1,), {}),
        (lambda: 0, (), {}),
        (os.path.join, ((),), {}),
    ],
)
def test_whatever_is_not_plain_is_pickled_whole(function, args, kwargs):
    data = calls.encode_call(function, args, kwargs)
    assert data[0] == PICKLED
    assert decode_plain(None, data) is None


def test_a_function_of_main_goes_by_value(monkeypatch):
    made = types.FunctionType((lambda: 0).__code__, {"__name__": "__main__"}, "made")
    made.__module__, made.__qualname__ = "__main__", "made"
    monkeypatch.setattr(sys.modules["__main__"], "made", made, raising=False)
    assert encode_plain(made, ()) is None


def test_a_name_is_looked_up_anew_each_time(monkeypatch):
    data = calls.encode_call(two, (1, 2), {})
    monkeypatch.setattr(sys.modules[__name__], "two", operator.add)
    original = decode_plain(None, data)
    assert original == (operator.add, (1, 2))
    monkeypatch.undo()
    assert decode_plain(None, data)[0] is two


def test_what_its_module_has_no_more_under_its_name_is_not_named(monkeypatch):
    first = two
    assert encode_plain(first, (1, 2)) is not None
    monkeypatch.setattr(sys.modules[__name__], "two", operator.add)
    assert encode_plain(first, (1, 2)) is None


def test_the_module_is_imported_where_it_is_needed(tmp_path, monkeypatch):
    (tmp_path / "needed_module.py").write_text("def f(a):\n    return a * 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    import needed_module

    data = calls.encode_call(needed_module.f, (4,), {})
    monkeypatch.delitem(sys.modules, "needed_module")
    function, args = decode_plain(None, data)
    assert function(*args) == 8
    assert function is not needed_module.f


def test_more_functions_than_are_remembered_go_all_the_same():
    module = types.ModuleType("many_functions")
    sys.modules["many_functions"] = module
    try:
        for n in range(3000):
            made = types.FunctionType((lambda: 0).__code__, {"__name__": "many_functions"}, f"f{n}")
            made.__module__, made.__qualname__ = "many_functions", f"f{n}"
            setattr(module, f"f{n}", made)
            assert decode_plain(None, encode_plain(made, (n,))) == (made, (n,))
    finally:
        del sys.modules["many_functions"]


@pytest.mark.parametrize(
    "data",
    [
        bytes((NAMED,)),
        bytes((NAMED, 5, 0)) + b"a",
        bytes((NAMED, 3, 0)) + b"a\0b",
        bytes((NAMED, 3, 0)) + b"abc",
        bytes((NAMED, 6, 0)) + b"os\0abc" + b"\x80",
        bytes((PLAIN,)),
        bytes((PLAIN,)) + b"\x80\x05N",
        bytes((NAMED, 2, 0)) + b"\xff\0" + b"\x80\x05).",
    ],
)
def test_damaged_bytes_fail_as_any_call_does(data):
    assert isinstance(calls.run(two, data), CallFailed)


@pytest.mark.parametrize("value", [1, 1.5, 2j, False, None, "text"])
def test_these_are_plain(value):
    assert is_plain(value)


@pytest.mark.parametrize("value", [b"", (), [], Text(), object(), sys])
def test_these_are_not(value):
    assert not is_plain(value)
