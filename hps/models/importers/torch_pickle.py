"""Reader of the pickle in a PyTorch checkpoint that does not execute it.

A pickle is a program for a stack machine. Python's machine imports and calls whatever the program names,
allocates any amount of memory, and hashes values of any depth. This machine has only the operations that
describe tensors, dicts, lists and numbers. The few names with which PyTorch describes tensors stand for
functions that record offsets, sizes and strides. Everything else in a pickle is an error."""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

_MAX_TENSOR_DIMS = 64
# Limits of a hostile file: a tensor takes about 40 operations, and an operation at most about 100 bytes.
_MAX_OPERATIONS = 5_000_000
# PyTorch's dtypes and the NumPy types of their stored bytes. bfloat16 is stored as its bits.
_DTYPES = {
    "float64": "f8",
    "float32": "f4",
    "float16": "f2",
    "bfloat16": "u2",
    "int64": "i8",
    "int32": "i4",
    "int16": "i2",
    "int8": "i1",
    "uint8": "u1",
    "uint16": "u2",
    "uint32": "u4",
    "uint64": "u8",
    "bool": "u1",
}
STORED_AS = {**_DTYPES, "bytes": "u1"}
_ALIASES = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
}
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "bytes",
}


class ForbiddenPickle(pickle.UnpicklingError):
    """The pickle names something that is not part of a tensor's description."""


class TorchStorage(NamedTuple):
    """The bytes ``data/<key>`` of the archive: elements of ``dtype``, stored as ``STORED_AS`` has it."""

    key: str
    dtype: str


class TorchTensor(NamedTuple):
    """A view of a storage; offset and strides in elements of ``dtype``."""

    storage: TorchStorage
    dtype: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _StorageType(NamedTuple):
    dtype: str


class _DType(NamedTuple):
    name: str


class _AllowedGlobal(NamedTuple):
    """A global name that the pickle may call, and the function that replaces it."""

    text: str
    call: Callable[..., Any]


def _integers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or len(values) > _MAX_TENSOR_DIMS:
        raise ForbiddenPickle("a tensor's sizes are not a tuple")
    if not all(type(v) is int and 0 <= v < 1 << 62 for v in values):
        raise ForbiddenPickle("a tensor has a size or stride that is not a natural number")
    return tuple(values)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_rest: Any) -> TorchTensor:
    if not isinstance(storage, TorchStorage):
        raise ForbiddenPickle("a tensor without a storage")
    return _view(storage, storage.dtype, offset, size, stride)


def _tensor_v3(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> TorchTensor:
    _grad, _hooks, dtype, *_ = rest
    if not isinstance(storage, TorchStorage) or not isinstance(dtype, _DType):
        raise ForbiddenPickle("a tensor without a storage or dtype")
    return _view(storage, dtype.name, offset, size, stride)


def _view(storage: TorchStorage, dtype: str, offset: Any, size: Any, stride: Any) -> TorchTensor:
    sizes, strides = _integers(size), _integers(stride)
    (start,) = _integers((offset,))
    if len(sizes) != len(strides):
        raise ForbiddenPickle("a tensor whose sizes and strides differ in number")
    return TorchTensor(storage, dtype, start, sizes, strides)


def _parameter(data: Any, *_rest: Any) -> Any:
    return data


_ALLOWED: dict[str, Callable[..., Any]] = {
    "_codecs.encode": lambda text, _coding: text.encode("latin-1"),  # how protocol 2 writes bytes
    "collections.OrderedDict": dict,  # called without arguments; SETITEMS adds its items
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.Size": lambda sizes=(): _integers(sizes),
}


def _named(module: str, name: str) -> _AllowedGlobal | _StorageType | _DType:
    text = f"{module}.{name}"
    if text in _ALLOWED:
        return _AllowedGlobal(text, _ALLOWED[text])
    if module in ("torch", "torch.storage") and name in _STORAGES:
        return _StorageType(_STORAGES[name])
    if module == "torch" and (dtype := _ALIASES.get(name, name)) in _DTYPES:
        return _DType(dtype)
    raise ForbiddenPickle(f"the pickle uses the global name {text[:200]}")


def _is_key(key: Any) -> bool:
    """Return True if a value may be a dict's key: it is cheap to hash and to format."""
    if type(key) is tuple:
        return len(key) <= _MAX_TENSOR_DIMS and all(
            type(k) is not tuple and _is_key(k) for k in key
        )
    if type(key) is int:
        return key.bit_length() <= 64
    return key is None or type(key) in (str, bytes, bool, float)


class _PickleMachine:
    """State of the stack machine while it reads a pickle: stack, marks and memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise IndexError("its stack is empty")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        """Return the container on top of the stack, which is to be filled. Raises unless it is a ``kind``."""
        if type(self.stack[-1]) is not kind:
            raise ForbiddenPickle(f"the pickle fills an object that is not a {kind.__name__}")
        return self.stack[-1]

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def put_items(self, items: list[Any]) -> None:
        target = self.top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not _is_key(key):
                raise ForbiddenPickle(
                    f"the pickle has a dict with a {type(key).__name__} for a key"
                )
            target[key] = value

    def reduce(self) -> Any:
        args, function = self.pop(), self.pop()
        if type(function) is not _AllowedGlobal or type(args) is not tuple:
            raise ForbiddenPickle("the pickle calls an object that is not a function")
        if function.call is dict and args:
            raise ForbiddenPickle("the pickle makes an OrderedDict with arguments")
        return function.call(*args)

    def build(self) -> None:
        """Discard the attributes of an OrderedDict (module versions); other objects may not have any."""
        self.pop()
        self.top(dict)

    def stack_global(self) -> Any:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            raise ForbiddenPickle("the pickle has a name that is not a string")
        return _named(module, name)

    def memoize(self, number: int) -> None:
        self.memo[number] = self.stack[-1]


def _storage(pid: Any) -> TorchStorage:
    match pid:
        case ("storage", _StorageType() as kind, str(key), str(), int(count)) if count >= 0:
            return TorchStorage(key, kind.dtype)
    raise ForbiddenPickle("the pickle refers to an object that is not a storage")


def _values(*names: str) -> dict[str, Callable[[_PickleMachine, Any], Any]]:
    return dict.fromkeys(names, lambda _m, value: value)


# Operations whose result is pushed on the stack.
_PUSHING: dict[str, Callable[[_PickleMachine, Any], Any]] = {
    **_values("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    **_values("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    **_values("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    "NONE": lambda _m, _a: None,
    "NEWTRUE": lambda _m, _a: True,
    "NEWFALSE": lambda _m, _a: False,
    "EMPTY_LIST": lambda _m, _a: [],
    "EMPTY_DICT": lambda _m, _a: {},
    "EMPTY_TUPLE": lambda _m, _a: (),
    "TUPLE": lambda m, _a: tuple(m.since_mark()),
    "TUPLE1": lambda m, _a: (m.pop(),),
    "TUPLE2": lambda m, _a: (m.pop(), m.pop())[::-1],
    "TUPLE3": lambda m, _a: (m.pop(), m.pop(), m.pop())[::-1],
    "BINGET": lambda m, number: m.memo[number],
    "LONG_BINGET": lambda m, number: m.memo[number],
    "GLOBAL": lambda _m, text: _named(*text.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _a: m.stack_global(),
    "REDUCE": lambda m, _a: m.reduce(),
    "BINPERSID": lambda m, _a: _storage(m.pop()),
}
# Operations that change the stack, the memo or a container, and push nothing.
_ALTERING: dict[str, Callable[[_PickleMachine, Any], Any]] = {
    "PROTO": lambda _m, _a: None,
    "FRAME": lambda _m, _a: None,
    "STOP": lambda _m, _a: None,
    "MARK": lambda m, _a: m.marks.append(len(m.stack)),
    "BINPUT": _PickleMachine.memoize,
    "LONG_BINPUT": _PickleMachine.memoize,
    "MEMOIZE": lambda m, _a: m.memoize(len(m.memo)),
    "APPEND": lambda m, _a: (item := m.pop(), m.top(list).append(item)),
    "APPENDS": lambda m, _a: (items := m.since_mark(), m.top(list).extend(items)),
    "SETITEM": lambda m, _a: m.put_items([m.pop(), m.pop()][::-1]),
    "SETITEMS": lambda m, _a: m.put_items(m.since_mark()),
    "BUILD": lambda m, _a: m.build(),
}


def read_pickle(data: bytes) -> Any:
    """Return the checkpoint's object, with tensors as `TorchTensor`. Raises pickle.UnpicklingError."""
    machine = _PickleMachine()
    try:
        for count, (operation, argument, _at) in enumerate(pickletools.genops(data)):
            name = operation.name
            if count >= _MAX_OPERATIONS:
                raise ForbiddenPickle(f"the pickle has more than {_MAX_OPERATIONS} operations")
            if (push := _PUSHING.get(name)) is not None:
                machine.stack.append(push(machine, argument))
            elif (alter := _ALTERING.get(name)) is not None:
                alter(machine, argument)
            else:
                raise ForbiddenPickle(f"the pickle has the operation {name}, which no tensor needs")
        return machine.pop()
    except ForbiddenPickle:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise pickle.UnpicklingError(f"the pickle is damaged: {error!r}") from error
