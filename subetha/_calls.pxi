# Calls that are nothing special, as bytes: the layouts NAMED and PLAIN of calls.py, which has all others.

cdef extern from "Python.h":
    PyObject *PyImport_GetModuleDict()

cdef enum:
    CALL_NAMED = 2
    CALL_PLAIN = 3
    NAME_AT = 3             # where a name begins: behind what it is, u8, and its length, u16
    MOST_NAMES = 1024       # remembered
    PICKLE_PROTOCOL = 5

cdef bytes PLAIN_HEAD = bytes((CALL_PLAIN,))
cdef frozenset PLAIN_TYPES = frozenset((int, float, complex, bool, str, type(None)))
cdef frozenset FUNCTION_TYPES = frozenset((FunctionType, BuiltinFunctionType, type))

cdef dict heads_of = {}     # a function's module, name, and both as they stand in a job
cdef dict names_of = {}     # the other way round


cdef object module_of(str name):
    """What `sys.modules` has under this name, or None."""
    return (<object> PyImport_GetModuleDict()).get(name)


cdef bytes head_of(object function):
    """What stands before the arguments where a module has the function under its name, as pickle would find it; else None."""
    cdef str module, name
    cdef bytes head, both
    if type(function) not in FUNCTION_TYPES:
        return None
    found = heads_of.get(function)
    if found is not None:
        module, name, head = <tuple> found
        return head if getattr(module_of(module), name, None) is function else None
    module, name = str(function.__module__), function.__qualname__
    both = f"{module}\0{name}".encode("utf-8", "surrogatepass")
    if (
        module == "__main__" or len(both) > 0xFFFF or "\0" in module
        or getattr(module_of(module), name, None) is not function
    ):
        return None
    head = bytes((CALL_NAMED, len(both) & 0xFF, len(both) >> 8)) + both
    if len(heads_of) >= MOST_NAMES:
        heads_of.clear()
    heads_of[function] = module, name, head
    return head


cdef object function_of(bytes head):
    """The function that a head names; imports its module, where that is not there."""
    found = names_of.get(head)
    if found is None:
        if len(names_of) >= MOST_NAMES:
            names_of.clear()
        found = names_of[head] = tuple(head[NAME_AT:].decode("utf-8", "surrogatepass").split("\0"))
    module, name = <tuple> found
    there = module_of(module)
    if there is None:
        there = import_module(module)
    return getattr(there, name)


def is_plain(value):
    """Is it a number, a text or None: of those types whose pickles take no buffers and refer to nothing?"""
    return type(value) in PLAIN_TYPES


def encode_plain(function, tuple args not None):
    """The bytes of a call with plain arguments.

    Parameters
    ----------
    function : callable or None
        None: whoever runs it knows.
    args : tuple

    Returns
    -------
    bytes or None
        None where an argument is something else, or the function cannot be named.
    """
    cdef bytes head = PLAIN_HEAD
    cdef object value
    for value in args:
        if type(value) not in PLAIN_TYPES:
            return None
    if function is not None:
        head = head_of(function)
        if head is None:
            return None
    return head + <bytes> pickle_dumps(args, PICKLE_PROTOCOL)


def decode_plain(function, data):
    """What such bytes call, and with which arguments.

    Parameters
    ----------
    function : callable or None
        Who is called where no name is there.
    data : bytes-like

    Returns
    -------
    function : callable
    args : tuple
        Or None in place of both, where it is a call of another kind.
    """
    cdef Text text
    cdef uint64_t end = 1
    text_of(data, &text)
    try:
        if text.length == 0 or text.data[0] not in (CALL_NAMED, CALL_PLAIN):
            return None
        if text.data[0] == CALL_NAMED:
            if text.length < NAME_AT:
                raise ValueError(f"expected {NAME_AT} bytes and a name, found {text.length}")
            end = min(<uint64_t> NAME_AT + get_u16(text.data + 1), <uint64_t> text.length)
            function = function_of(PyBytes_FromStringAndSize(<const char *> text.data, end))
        return function, pickle_loads(PyBytes_FromStringAndSize(<const char *> text.data + end, text.length - end))
    finally:
        text_done(&text)
