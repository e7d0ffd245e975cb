"""Registration of handlers, and what a pass comes to."""

import threading

import pytest

import subetha.pass_registry
from subetha.errors import ExecutionError, PassError, ResultTooLarge, UnknownClosureId
from subetha.pass_registry import Pass, PassRegistry

WAIT_S = 30


@pytest.fixture
def registry():
    return PassRegistry()


def reverse(args):
    return args[::-1]


class Unprintable(Exception):
    def __str__(self):
        raise KeyError("no text")


def raising(error):
    def handler(args):
        raise error

    return handler


def test_a_pass_runs_the_handler_registered_under_its_closure_id(registry):
    registry.register(7, reverse)
    registry.register(8, bytes.upper)
    assert registry.execute(Pass(7, b"abc")) == b"cba"
    assert registry.execute(Pass(8, b"abc")) == b"ABC"


def test_register_gives_back_the_replaced_handler_or_none(registry):
    assert registry.register(7, reverse) is None
    assert registry.register(7, bytes.upper) is reverse
    assert registry.register(8, reverse) is None
    assert registry.execute(Pass(7, b"abc")) == b"ABC"


def test_the_decorator_form_registers_the_function_and_leaves_it_as_it_is(registry):
    def handler(args):
        return args * 2

    assert registry.register(7)(handler) is handler
    assert registry.execute(Pass(7, b"ab")) == b"abab"


def test_unregister_gives_back_the_handler_and_later_passes_find_none(registry):
    registry.register(7, reverse)
    assert registry.unregister(7) is reverse
    assert registry.unregister(7) is None
    assert not registry.is_registered(7)
    assert isinstance(registry.execute(Pass(7, b"")), UnknownClosureId)


def test_is_registered_and_registered_count_follow_each_change(registry):
    assert (registry.is_registered(7), registry.registered_count()) == (False, 0)
    registry.register(7, reverse)
    assert (registry.is_registered(7), registry.registered_count()) == (True, 1)
    registry.register(7, bytes.upper)
    registry.register(8, bytes.upper)
    assert registry.registered_count() == 2
    registry.unregister(7)
    assert (registry.is_registered(7), registry.registered_count()) == (False, 1)


@pytest.mark.parametrize("closure_id", [0, 1, 2**32 - 1])
def test_both_ends_of_the_closure_ids_are_accepted(registry, closure_id):
    registry.register(closure_id, reverse)
    assert registry.execute(Pass(closure_id, b"ab")) == b"ba"


@pytest.mark.parametrize("closure_id", [-1, 2**32, 2**64])
def test_a_closure_id_that_is_no_u32_is_refused_with_the_limits_named(registry, closure_id):
    for call in (lambda: registry.register(closure_id, reverse), lambda: registry.register(closure_id)):
        with pytest.raises(ValueError, match=rf"{closure_id}.* 0 to 4294967295"):
            call()
    for call in (registry.unregister, registry.is_registered):
        with pytest.raises(ValueError, match=rf"{closure_id}.* 0 to 4294967295"):
            call(closure_id)
    assert registry.registered_count() == 0


@pytest.mark.parametrize("closure_id", ["7", 7.0, None, True])
def test_a_closure_id_that_is_no_integer_is_refused(registry, closure_id):
    for call in (lambda: registry.register(closure_id, reverse), lambda: registry.register(closure_id)):
        with pytest.raises(TypeError, match="integer"):
            call()
    for call in (registry.unregister, registry.is_registered):
        with pytest.raises(TypeError, match="integer"):
            call(closure_id)


@pytest.mark.parametrize("handler", [None, b"bytes", 3])
def test_a_handler_that_cannot_be_called_is_refused_and_replaces_nothing(registry, handler):
    registry.register(7, reverse)
    with pytest.raises(TypeError, match="closure id 7 must be callable"):
        registry.register(7, handler)
    with pytest.raises(TypeError, match="closure id 7 must be callable"):
        registry.register(7)(handler)
    assert registry.execute(Pass(7, b"ab")) == b"ba"


@pytest.mark.parametrize("returned", [bytearray(b"xyz"), memoryview(b"xyz"), memoryview(b"x_y_z")[::2]])
def test_a_result_in_another_buffer_type_comes_as_bytes(registry, returned):
    registry.register(7, lambda args: returned)
    result = registry.execute(Pass(7, b""))
    assert (type(result), result) == (bytes, b"xyz")


def test_a_result_of_a_bytes_subclass_comes_as_plain_bytes(registry):
    class Tagged(bytes):
        pass

    registry.register(7, lambda args: Tagged(b"xyz"))
    result = registry.execute(Pass(7, b""))
    assert (type(result), result) == (bytes, b"xyz")


@pytest.mark.parametrize("returned", [None, "text", 5, [b"x"]])
def test_a_result_of_another_type_is_an_execution_error_that_names_it(registry, returned):
    registry.register(7, lambda args: returned)
    result = registry.execute(Pass(7, b""))
    assert type(result) is ExecutionError
    assert str(result).startswith("TypeError: ")
    assert type(returned).__name__ in str(result)


def test_a_pass_error_that_a_handler_returns_is_the_result(registry):
    error = ResultTooLarge("3 bytes, room for 2")
    registry.register(7, lambda args: error)
    assert registry.execute(Pass(7, b"")) is error


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit("bad"), KeyboardInterrupt("bad"), PassError("bad")])
def test_whatever_a_handler_raises_becomes_an_execution_error_with_its_class_and_cause(registry, error):
    registry.register(7, raising(error))
    result = registry.execute(Pass(7, b""))
    assert type(result) is ExecutionError
    assert str(result) == f"{type(error).__name__}: bad"
    assert result.__cause__ is error


def test_an_exception_without_a_message_is_named_by_its_class_alone(registry):
    registry.register(7, raising(ZeroDivisionError()))
    assert str(registry.execute(Pass(7, b""))) == "ZeroDivisionError"


def test_an_exception_whose_text_cannot_be_made_is_still_an_execution_error(registry):
    registry.register(7, raising(Unprintable()))
    result = registry.execute(Pass(7, b""))
    assert type(result) is ExecutionError
    assert str(result).startswith("Unprintable: ")


def test_a_returned_pass_error_whose_text_cannot_be_made_becomes_an_execution_error(registry):
    class UnprintablePassError(Unprintable, PassError):
        pass

    registry.register(7, lambda args: UnprintablePassError())
    assert type(registry.execute(Pass(7, b""))) is ExecutionError


def test_the_text_of_an_error_encodes_also_where_it_names_a_file_that_is_not_utf8(registry):
    registry.register(7, raising(OSError("cannot read \udcff.txt")))
    text = str(registry.execute(Pass(7, b"")))
    assert text.encode("utf-8").decode("utf-8") == text
    assert text == "OSError: cannot read \\udcff.txt"


def test_a_pass_without_a_handler_is_an_unknown_closure_id(registry):
    result = registry.execute(Pass(4242, b""))
    assert type(result) is UnknownClosureId
    assert "4242" in str(result)


def test_no_lock_is_held_while_a_handler_runs(registry):
    inside, go_on = threading.Event(), threading.Event()

    def blocked(args):
        inside.set()
        assert go_on.wait(WAIT_S)
        return b"old"

    registry.register(7, blocked)
    results = []
    runner = threading.Thread(target=lambda: results.append(registry.execute(Pass(7, b""))))
    runner.start()
    assert inside.wait(WAIT_S)

    changed = []

    def change():
        changed.append(registry.register(7, reverse))
        changed.append(registry.execute(Pass(7, b"ab")))
        changed.append(registry.unregister(7))

    changer = threading.Thread(target=change, daemon=True)
    changer.start()
    changer.join(WAIT_S)
    go_on.set()
    runner.join(WAIT_S)
    assert changed == [blocked, b"ba", reverse]
    assert results == [b"old"]


def test_a_handler_may_register_unregister_and_execute(registry):
    def outer(args):
        registry.register(8, reverse)
        inner = registry.execute(Pass(8, args))
        registry.unregister(7)
        return inner

    registry.register(7, outer)
    assert registry.execute(Pass(7, b"abc")) == b"cba"
    assert not registry.is_registered(7)


def test_of_two_threads_that_replace_a_handler_at_once_each_is_given_a_different_one(registry):
    first_has_looked, second_has_looked = threading.Event(), threading.Event()

    class PausingDict(dict):
        def get(self, key, default=None):
            found = super().get(key, default)
            if not first_has_looked.is_set():
                first_has_looked.set()
                # The other thread gets every chance to come in between looking and replacing; a lock leaves it none.
                second_has_looked.wait(0.2)
            else:
                second_has_looked.set()
            return found

    registry.handlers = PausingDict()
    given_back = []

    def replace(handler):
        given_back.append(registry.register(7, handler))

    first = threading.Thread(target=replace, args=(reverse,))
    first.start()
    assert first_has_looked.wait(WAIT_S)
    replace(bytes.upper)
    first.join(WAIT_S)
    given_back.append(registry.unregister(7))
    assert sorted(given_back, key=str) == sorted([None, reverse, bytes.upper], key=str)


def test_two_registries_do_not_see_each_others_handlers(registry):
    registry.register(7, reverse)
    assert not PassRegistry().is_registered(7)


def test_the_module_functions_share_the_registry_of_the_process():
    closure_id = 4_123_456_789
    before = subetha.pass_registry.registered_count()
    assert subetha.pass_registry.register(closure_id, reverse) is None
    try:
        assert subetha.pass_registry.is_registered(closure_id)
        assert subetha.pass_registry.default_registry.is_registered(closure_id)
        assert subetha.pass_registry.registered_count() == before + 1
        assert subetha.pass_registry.execute(Pass(closure_id, b"ab")) == b"ba"
    finally:
        assert subetha.pass_registry.unregister(closure_id) is reverse
    assert subetha.pass_registry.registered_count() == before


def test_one_that_is_replaced_under_its_name_is_not_missing_for_a_moment():
    registry = PassRegistry()
    missing = []

    class Watched(dict):
        def pop(self, key, *default):
            missing.append(key)
            return super().pop(key, *default)

    old = registry.register_named("moves", bytes, queue_name="first")
    kept = registry.register_named("stays", bytes, max_concurrency=1)
    registry.handlers = Watched(registry.handlers)
    registry.limits = Watched(registry.limits)
    registry.register_named("stays", bytes.upper, max_concurrency=2)
    assert missing == []
    assert registry.execute(Pass(kept, b"a")) == b"A"
    assert registry.limits[kept].places == 2
    registry.register_named("stays", bytes.upper)
    assert kept not in registry.limits
    new = registry.register_named("moves", bytes, queue_name="second")
    assert registry.closure_ids() == {kept, new}
    assert not registry.is_registered(old)
