#!/usr/bin/env python3
"""Uses model weights that another process of this machine holds (kiln-pull resident), without reading them again.

    import kiln_attach
    with kiln_attach.attach("sha256:…") as held:
        tensors = held.tensors()  # with torch: dict of names and tensors, in the memory of the holder
        buffers = held.buffers()  # without torch: dict of names and read-only memoryviews

One file, Python 3.9 or later, standard library only. torch is needed by tensors() alone. The protocol is doc/attach.md
of https://github.com/kiln-registry/kiln-registry. Linux only.

The lease lasts as long as the attachment, or any tensor or buffer that came from it: close() or the end of the with
block gives up the attachment's own part, and the last tensor gives back the rest. Memory of the host is mapped for
reading: a write to such a tensor ends the process with SIGSEGV. attach(writable=True) makes a private copy of a page
that is written to, tensors(copy=True) copies all. Memory of a device can be written to by whoever has it mapped: don't.

A process made by fork has the lease too; it lasts until both are done.
"""

from __future__ import annotations

import argparse
import array
import base64
import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import re
import select
import socket
import stat
import struct
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Iterator

if TYPE_CHECKING:
    import torch

ALGORITHM = "kiln.base-model-content.v1"
MAX_DOCUMENT = 256 << 20  # bytes
MAX_HEADER = 100_000_000 + 8  # bytes: the limit of safetensors, and the 8 of the length
MAX_LINE = 64 << 10  # bytes of a line after the document
MAX_DESCRIPTORS = 64  # in one message
MAX_INTEGER = 2**53 - 1
CHUNK = 16 << 20  # bytes that --check reads at a time

DTYPES = {  # of safetensors: bits of an element, and what torch calls it
    "F4": (4, "float4_e2m1fn_x2"), "F6_E2M3": (6, ""), "F6_E3M2": (6, ""), "BOOL": (8, "bool"), "U8": (8, "uint8"),
    "I8": (8, "int8"), "F8_E5M2": (8, "float8_e5m2"), "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E8M0": (8, "float8_e8m0fnu"), "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"), "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "I16": (16, "int16"), "U16": (16, "uint16"), "F16": (16, "float16"), "BF16": (16, "bfloat16"),
    "I32": (32, "int32"), "U32": (32, "uint32"), "F32": (32, "float32"), "C64": (64, "complex64"),
    "F64": (64, "float64"), "I64": (64, "int64"), "U64": (64, "uint64"),
}  # fmt: skip


class AttachError(Exception):
    """Something is wrong, in one line. The subclasses say what."""


class NoHolder(AttachError):
    """No process listens on the socket."""


class Refused(AttachError):
    """The holder refused. code is for programs: RESIDENT_OTHER_BASE, ADAPTER_UNKNOWN and so on."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(f"{message} ({code})" if code else message)
        self.code = code


class Untrusted(AttachError):
    """What the holder sent is not what it should be: nothing of it was used."""


class OtherUser(Untrusted):
    """The holder is a process of another user, or its folder could be."""


class Unreachable(AttachError):
    """The holder closed the connection, or did not answer."""


class Damaged(AttachError):
    """The memory is not what the digests say."""


class DeviceError(AttachError):
    """A device is not there, or its driver refused."""


# ---- the document


def parse(text: bytes, aggregate: str, adapter: str | None = None) -> dict[str, Any]:
    """Reads a document and checks it against itself and what was asked for; Untrusted names what is wrong."""
    try:
        document = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique, parse_int=_integer, parse_float=_no, parse_constant=_no
        )
        _match(DOCUMENT, document, "document")
        _check(document, aggregate, adapter)
    except (ValueError, RecursionError) as e:
        raise Untrusted(f"not a document of resident weights: {e}") from None
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member is there twice")
    return members


def _integer(text: str) -> int:
    if text.startswith("-") or len(text) > 16 or int(text) > MAX_INTEGER:
        raise ValueError(f"{text[:40]} is not an integer from 0 to 2^53 - 1")
    return int(text)


def _no(text: str) -> None:
    raise ValueError(f"{text[:40]} is not an integer")


# The format: a type, a pattern, [of a list], (of what may be null,), or the members of an object, some of which may be
# left out (?).
DIGEST = re.compile("sha256:[0-9a-f]{64}")
IPC = ({"kind": str, "offset": int, "handle?": str, "descriptor?": int, "allocation_bytes?": int},)
DOCUMENT = {
    "schema_version": int, "document_type": str, "aggregate_algorithm": str, "aggregate_sha256": DIGEST,
    "adapter?": {"digest": DIGEST, "name": str},
    "verification": {"method": str, "completed_at": str, "bytes": int, "read_back": bool},
    "devices": [{"index": int, "uuid": str, "pci": str, "backend": str}],
    "shards": [{"name": str, "sha256": DIGEST, "size_bytes": int, "data_nbytes": int, "device": int, "ipc": IPC,
                "replicas?": [{"device": int, "ipc": IPC}]}],
    "tensors": [{"name": str, "dtype": str, "shape": [int], "shard": int, "offset": int, "nbytes": int,
                 "aligned": bool}],
    "lease": ({"id": str, "mode": str},), "generation": int,
}  # fmt: skip


def _match(form: Any, value: Any, where: str) -> None:
    if isinstance(form, tuple):
        if value is not None:
            _match(form[0], value, where)
        return
    kind = str if isinstance(form, re.Pattern) else form if isinstance(form, type) else type(form)
    if type(value) is not kind or kind is not form and kind is str and not form.fullmatch(value):
        raise ValueError(f"{where} is not what it should be")
    if kind is str:
        value.encode()  # no half of a surrogate pair
    elif kind is list:
        for i, element in enumerate(value):
            _match(form[0], element, f"{where}[{i}]")
    elif kind is dict:
        odd = value.keys() - {name.rstrip("?") for name in form} or {n for n in form if n[-1] != "?"} - value.keys()
        if odd:
            raise ValueError(f"{where} has other members than it should: {min(odd)[:40]!r}")
        for name, member in value.items():
            _match(form[name] if name in form else form[name + "?"], member, f"{where}.{name}")


def aggregate_of(shards: list[dict[str, Any]]) -> str:
    """The aggregate (kiln.base-model-content.v1) of the shards of a document."""
    records = sorted((bytes.fromhex(s["sha256"][7:]), s["size_bytes"]) for s in shards)
    text = ALGORITHM.encode() + b"\0" + struct.pack("<Q", len(records))
    text += b"".join(struct.pack("<Q", size) + digest for digest, size in records)
    return "sha256:" + hashlib.sha256(text).hexdigest()


def _check(d: dict[str, Any], aggregate: str, adapter: str | None) -> None:
    kind = "kiln.resident-adapter.v1" if adapter else "kiln.resident-weights.v1"
    fixed = {"schema_version": 1, "document_type": kind, "aggregate_algorithm": ALGORITHM}
    for name, want in {**fixed, "aggregate_sha256": aggregate}.items():
        if d[name] != want:
            raise ValueError(f"{name} is {d[name]!r}, want {want!r}")
    if d.get("adapter", {}).get("digest") != adapter:
        raise ValueError(f"it is of another adapter than {adapter}")
    if d["verification"]["method"] != "sha256-full":
        raise ValueError("it does not say that every byte was hashed")
    if d["lease"] is None or d["lease"]["mode"] != "zero_copy":
        raise ValueError("no lease of the mode zero_copy")
    devices = [v["index"] for v in d["devices"]]
    if len(set(devices)) != len(devices):
        raise ValueError("a device is there twice")
    descriptors = 0
    for s in d["shards"]:
        if not 8 <= s["size_bytes"] - s["data_nbytes"] <= MAX_HEADER:
            raise ValueError(f"shard {s['name']!r} has {s['data_nbytes']} bytes of data in {s['size_bytes']}")
        for place in _places(s):
            if place["device"] not in devices:
                raise ValueError(f"shard {s['name']!r} is on a device that is not listed")
            descriptors += _check_handle(place["ipc"], s, descriptors)
    if not adapter and aggregate_of(d["shards"]) != aggregate:
        raise ValueError("the shards have another aggregate")
    names: dict[str, Any] = {}
    for t in d["tensors"]:
        _check_tensor(t, d["shards"])
        what = d["shards"][t["shard"]]["sha256"], t["offset"], t["dtype"], t["shape"]
        if names.setdefault(t["name"], what) != what:
            raise ValueError(f"tensor {t['name']!r} is there twice, in shards that differ")


def _places(shard: dict[str, Any]) -> list[dict[str, Any]]:
    return [shard, *shard.get("replicas", [])]


def _check_handle(ipc: dict[str, Any] | None, shard: dict[str, Any], next_descriptor: int) -> bool:
    """Returns whether the handle is a descriptor."""
    name, n = shard["name"], shard["data_nbytes"]
    if (ipc is None) != (n == 0):
        raise ValueError(f"shard {name!r} has {n} bytes of data, and a handle: {ipc is not None}")
    if ipc is None:
        return False
    members = {"memfd": {"descriptor"}, "cuda-ipc": {"handle"}, "vmm-fd": {"descriptor", "allocation_bytes"}}
    if members.get(ipc["kind"]) != ipc.keys() - {"kind", "offset"}:
        raise ValueError(f"shard {name!r} has a handle of kind {ipc['kind'][:40]!r} with {sorted(ipc)}")
    if ipc.get("descriptor", next_descriptor) != next_descriptor:
        raise ValueError(f"shard {name!r} has descriptor {ipc['descriptor']}, want {next_descriptor}")
    if ipc["offset"] + n > ipc.get("allocation_bytes", MAX_INTEGER):
        raise ValueError(f"shard {name!r} lies outside of its memory")
    if "handle" in ipc and len(base64.b64decode(ipc["handle"], validate=True)) != 64:
        raise ValueError(f"shard {name!r} has a handle that is not of 64 bytes")
    return "descriptor" in ipc


def _check_tensor(t: dict[str, Any], shards: list[dict[str, Any]]) -> None:
    bits = DTYPES.get(t["dtype"], (0,))[0]
    if not bits:
        raise ValueError(f"tensor {t['name']!r} has an unknown dtype {t['dtype'][:40]!r}")
    if t["shard"] >= len(shards):
        raise ValueError(f"tensor {t['name']!r} is in shard {t['shard']} of {len(shards)}")
    for n in [] if 0 in t["shape"] else t["shape"]:
        bits *= n
        if bits > 8 * MAX_INTEGER:
            raise ValueError(f"tensor {t['name']!r} is too large")
    if bits * (0 not in t["shape"]) != 8 * t["nbytes"]:
        raise ValueError(f"tensor {t['name']!r} has {t['nbytes']} bytes for {t['dtype']} of shape {t['shape']}")
    if t["offset"] + t["nbytes"] > shards[t["shard"]]["data_nbytes"]:
        raise ValueError(f"tensor {t['name']!r} lies outside of its shard")
    if t["aligned"] != (t["offset"] % 16 == 0):
        raise ValueError(f"tensor {t['name']!r} at offset {t['offset']}, and aligned: {t['aligned']}")


# ---- the connection, which is the lease


def socket_path(aggregate: str) -> str:
    """Where a holder listens unless it was told otherwise. A relative folder in the environment counts as none."""
    folder = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    if not os.path.isabs(folder):
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        folder = os.path.join(runtime, "kiln") if os.path.isabs(runtime) else f"/tmp/kiln-{os.getuid()}"
    return os.path.join(folder, aggregate[len("sha256:") :] + ".sock")


def _check_folder(path: str, users: set[int]) -> None:
    """Refuses a folder in which others than these users could put a socket."""
    try:
        st = os.lstat(path)
    except FileNotFoundError:
        raise NoHolder(f"no resident weights in {path}: it is not there") from None
    if not stat.S_ISDIR(st.st_mode) or st.st_uid not in users or st.st_mode & 0o077:
        raise OtherUser(f"{path} is not a folder of user ID {', '.join(map(str, sorted(users)))} alone")


class _Connection:
    """A connection to the holder. It is closed when nobody refers to it any more."""

    def __init__(self, path: str, timeout: float, users: set[int]) -> None:
        self.path, self.users, self.deadline = path, users, time.monotonic() + timeout
        self.rest, self.files = bytearray(), []  # what was read and not yet used
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.settimeout(timeout)
            self.socket.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            raise NoHolder(f"no resident weights at {path}") from None
        except OSError as e:
            raise AttachError(f"{path}: {e}") from None
        _, uid, _ = struct.unpack("3i", self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in users:
            raise OtherUser(f"{path} is held by user ID {uid}; holder_uid trusts it")

    def close(self) -> None:
        self.socket.close()
        while self.files:
            os.close(self.files.pop())

    __del__ = close

    def send(self, data: bytes) -> None:
        try:
            self.socket.settimeout(max(0.001, self.deadline - time.monotonic()))
            self.socket.sendall(data)
        except OSError as e:
            raise AttachError(f"{self.path}: {e}") from None

    def fill(self) -> bool:
        """Reads more; False at the end. Descriptors may come with any byte."""
        left = self.deadline - time.monotonic()
        self.socket.settimeout(max(0.001, left))
        try:
            data, control, flags, _ = self.socket.recvmsg(
                1 << 20, socket.CMSG_SPACE(4 * MAX_DESCRIPTORS), socket.MSG_CMSG_CLOEXEC
            )
        except OSError as e:
            late = isinstance(e, socket.timeout)
            raise Unreachable(f"{self.path}: {'the holder did not answer in time' if late else e}") from None
        for level, kind, content in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files = array.array("i")
                files.frombytes(content[: len(content) - len(content) % files.itemsize])
                self.files.extend(files)
        if flags & socket.MSG_CTRUNC or len(self.files) > MAX_DESCRIPTORS:
            raise AttachError(f"{self.path}: descriptors got lost: too many were sent, or see ulimit -n")
        self.rest += data
        return bool(data)

    def until(self, end: bytes, most: int) -> bytes:
        at, seen = -1, 0
        while (at := self.rest.find(end, max(0, seen - len(end)))) < 0:
            seen = len(self.rest)
            if seen > most:
                raise Untrusted(f"{self.path}: the holder sent more than {most} bytes for one answer")
            if not self.fill():
                raise Unreachable(f"{self.path}: the holder closed the connection")
        if at > most:
            raise Untrusted(f"{self.path}: the holder sent more than {most} bytes for one answer")
        text = bytes(self.rest[:at])
        del self.rest[: at + len(end)]
        return text

    def ask(self, path: str, upgrade: bool = False, most: int = MAX_LINE) -> bytes:
        """Asks for a path: the body of the answer, or nothing and the connection is a stream of lines."""
        more = "Connection: Upgrade\r\nUpgrade: kiln-attach\r\n" if upgrade else "Connection: close\r\n"
        self.send(f"GET {path} HTTP/1.{int(upgrade)}\r\nHost: resident\r\n{more}\r\n".encode())
        status, *fields = self.until(b"\r\n\r\n", MAX_LINE).split(b"\r\n")
        found = re.fullmatch(rb"HTTP/1\.[01] ([0-9]{3}) .*", status)
        if not found:
            raise Untrusted(f"{self.path}: the holder does not speak HTTP")
        if upgrade and found[1] == b"101":
            return b""
        length = [f.split(b":", 1)[1] for f in fields if f.lower().startswith(b"content-length:")]
        want = None
        if length:
            if not re.fullmatch(rb"[0-9]{1,15}", length[0].strip()):
                raise Untrusted(f"{self.path}: the holder does not say how long its answer is")
            want = int(length[0])
        while (want is None or len(self.rest) < want) and len(self.rest) <= most and self.fill():
            pass
        body = bytes(self.rest[: most if want is None else want])
        if found[1] == b"200" and not upgrade:
            return body
        try:
            answer = json.loads(body)
            raise Refused(str(answer["error"])[:500], str(answer["code"])[:80])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise Refused(f"{self.path}: the holder answered {found[1].decode()}") from None

    def descriptors(self, first: int, count: int, note: Callable[[dict[str, Any]], None]) -> None:
        """Asks for descriptors, which are in files then. Events that come before them are noted."""
        want = {"first": first, "count": count}
        self.send(json.dumps({"descriptors": want}).encode() + b"\n")
        while True:
            line = _line(self.until(b"\n", MAX_LINE))
            if "error" in line:
                raise Refused(str(line["error"])[:500], str(line.get("code", ""))[:80])
            if "descriptors" not in line:
                note(line)
            elif line["descriptors"] != want or len(self.files) != count:
                raise Untrusted(f"{self.path}: the holder sent other descriptors than were asked for")
            else:
                return


def _line(text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    if type(line) is not dict:
        raise Untrusted("the holder sent a line that is no object")
    return line


# ---- memory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux


class _HostMemory:
    """A mapping of a sealed file in memory. It ends, and then the lease, when nobody refers to it any more."""

    device = None

    def __init__(self, lease: _Connection, fd: int, offset: int, size: int, writable: bool) -> None:
        self.mapped, self.lease, self.size = 0, lease, size
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if seals & _SEALS != _SEALS:
            raise Untrusted("the memory is not sealed: its holder could change it")
        if os.fstat(fd).st_size < offset + size:
            raise Untrusted(f"the memory has {os.fstat(fd).st_size} bytes, not {offset + size}")
        skip = offset % mmap.ALLOCATIONGRANULARITY
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # Private: before Linux 6.7 nothing that is sealed can be mapped shared. Pages are shared until written to.
        start = _libc.mmap(None, skip + size, prot, mmap.MAP_PRIVATE | _NORESERVE, fd, offset - skip)
        if start == ctypes.c_void_p(-1).value:
            raise AttachError(f"map {size} bytes: {os.strerror(ctypes.get_errno())}")
        self.start, self.mapped, self.address = start, skip + size, start + skip

    def __del__(self) -> None:
        if self.mapped:
            _libc.munmap(self.start, self.mapped)

    def bytes(self) -> ctypes.Array:
        data = (ctypes.c_ubyte * self.size).from_address(self.address)
        data.memory = self  # keeps the mapping and the lease
        return data

    def read(self, offset: int, size: int) -> bytes:
        return ctypes.string_at(self.address + offset, size)

    def tensor(self, torch: Any) -> torch.Tensor:
        return torch.frombuffer(self.bytes(), dtype=torch.uint8)


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = [("location_type", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int)]


class _Cuda:
    """The driver, once per process."""

    loaded: _Cuda | None = None

    def __init__(self) -> None:
        path = os.environ.get("KILN_CUDA_LIB") or "libcuda.so.1"
        try:
            self.lib = ctypes.CDLL(path)
        except OSError as e:
            raise DeviceError(f"the weights are on a CUDA device, and its driver can't be loaded: {e}") from None
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.init()
        self("cuInit", ctypes.c_uint(0))
        count = ctypes.c_int()
        self("cuDeviceGetCount", ctypes.byref(count))
        self.ordinals: dict[str, int] = {}
        self.contexts: dict[int, ctypes.c_void_p] = {}
        for i in range(count.value):
            device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            self("cuDeviceGet", ctypes.byref(device), ctypes.c_int(i))
            self("cuDeviceGetUuid_v2", raw, device)
            h = bytes(raw).hex()
            self.ordinals[f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"] = i

    @classmethod
    def load(cls) -> _Cuda:
        if cls.loaded is None:
            cls.loaded = cls()
        return cls.loaded

    def __call__(self, name: str, *args: Any) -> None:
        try:
            function = getattr(self.lib, name)
        except AttributeError:
            raise DeviceError(f"the CUDA driver has no {name}") from None
        code = function(*args)
        if code:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorName(code, ctypes.byref(text))
            raise DeviceError(f"{name}: {(text.value or b'error').decode()} ({code})")

    @contextmanager
    def on(self, ordinal: int) -> Iterator[None]:
        """Makes the primary context of a device, which torch uses too, current for a while. It is kept from then on."""
        if ordinal not in self.contexts:
            device, made = ctypes.c_int(), ctypes.c_void_p()
            self("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
            self("cuDevicePrimaryCtxRetain", ctypes.byref(made), device)
            self.contexts[ordinal] = made
        before = ctypes.c_void_p()
        self("cuCtxGetCurrent", ctypes.byref(before))
        self("cuCtxSetCurrent", self.contexts[ordinal])
        try:
            yield
        finally:
            self("cuCtxSetCurrent", before)


class _DeviceMemory:
    """A shard on a device. It is closed, and then the lease ends, when nobody refers to it any more."""

    def __init__(self, lease: _Connection, uuid: str, ipc: dict[str, Any], fd: int | None, size: int) -> None:
        self.pointer, self.lease, self.size, self.reserved = ctypes.c_uint64(), lease, size, 0
        self.cuda = _Cuda.load()
        if uuid not in self.cuda.ordinals:
            raise DeviceError(f"device {uuid} is not visible to this process (CUDA_VISIBLE_DEVICES, or its container)")
        self.device = self.cuda.ordinals[uuid]
        with self.cuda.on(self.device):
            if fd is None:
                handle = _Handle.from_buffer_copy(base64.b64decode(ipc["handle"]))
                self.cuda("cuIpcOpenMemHandle_v2", ctypes.byref(self.pointer), handle, ctypes.c_uint(1))
            else:
                self.map(fd, ipc["allocation_bytes"])
        self.address = self.pointer.value + ipc["offset"]

    def map(self, fd: int, size: int) -> None:
        cuda, physical = self.cuda, ctypes.c_uint64()
        cuda("cuMemImportFromShareableHandle", ctypes.byref(physical), ctypes.c_void_p(fd), ctypes.c_int(1))
        try:
            zero = ctypes.c_uint64(0)
            n = ctypes.c_size_t(size)
            cuda("cuMemAddressReserve", ctypes.byref(self.pointer), n, ctypes.c_size_t(0), zero, zero)
            try:
                cuda("cuMemMap", self.pointer, n, ctypes.c_size_t(0), physical, zero)
                self.reserved = size
            except DeviceError:
                cuda("cuMemAddressFree", self.pointer, n)
                self.pointer.value = 0
                raise
        finally:
            cuda("cuMemRelease", physical)  # the mapping keeps it
        for flags in (1, 3):  # for reading, or if the driver has no such thing, for writing too
            access = _Access(1, self.device, flags)
            try:
                return cuda("cuMemSetAccess", self.pointer, n, ctypes.byref(access), ctypes.c_size_t(1))
            except DeviceError:
                if flags == 3:
                    raise

    def __del__(self) -> None:
        if not self.pointer.value or sys.is_finalizing():
            return  # the driver gives it back when the process ends
        n = ctypes.c_size_t(self.reserved)
        try:
            with self.cuda.on(self.device):
                self.cuda("cuCtxSynchronize")  # what was started on the tensors still reads
                if self.reserved:
                    self.cuda("cuMemUnmap", self.pointer, n)
                    self.cuda("cuMemAddressFree", self.pointer, n)
                else:
                    self.cuda("cuIpcCloseMemHandle", self.pointer)
        except DeviceError as e:
            print(f"kiln_attach: {e}", file=sys.stderr)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}

    def read(self, offset: int, size: int) -> bytes:
        data, stream = ctypes.create_string_buffer(size), ctypes.c_void_p()
        with self.cuda.on(self.device):
            self.cuda("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))
            try:
                at = ctypes.c_uint64(self.address + offset)
                self.cuda("cuMemcpyDtoHAsync_v2", data, at, ctypes.c_size_t(size), stream)
                self.cuda("cuStreamSynchronize", stream)
            finally:
                self.cuda("cuStreamDestroy_v2", stream)
        return data.raw

    def tensor(self, torch: Any) -> torch.Tensor:
        flat = torch.as_tensor(self, device=f"cuda:{self.device}")
        if flat.data_ptr() != self.address:
            raise DeviceError("torch copied the memory instead of using it where it is")
        return flat


# ---- what callers use


def attach(
    aggregate: str,
    socket: str | None = None,
    *,
    adapter: str | None = None,
    device: str | None = None,
    writable: bool = False,
    holder_uid: int | None = None,
    timeout: float = 30.0,
) -> Attachment:
    """Attaches to the base with this aggregate, or to an adapter on it by the digest of its manifest.

    socket is the path of the holder's, by default that of the aggregate. device is the UUID of the one to use where a
    shard is on several. writable makes a write to host memory copy the page for this process. The holder must be of
    this process's user, or root; holder_uid trusts another user too. timeout is in seconds, for the attempt. Every
    AttachError leaves nothing behind.
    """
    for digest in (aggregate, adapter or aggregate):
        if not DIGEST.fullmatch(digest):
            raise AttachError(f"{digest[:80]!r} is no digest: want sha256: and 64 hexadecimal digits")
    users = {os.geteuid(), 0} | ({holder_uid} if holder_uid is not None else set())
    path = socket or socket_path(aggregate)
    if not socket:
        _check_folder(os.path.dirname(path), users)
    lease, held = _Connection(path, timeout, users), None
    try:
        what = f"/v1/resident/{aggregate}" + (f"/adapters/{adapter}" if adapter else "")
        lease.ask(what, upgrade=True)
        held = Attachment(parse(lease.until(b"\n", MAX_DOCUMENT), aggregate, adapter), lease, what)
        held._open(device, writable)
    except BaseException:  # its traceback refers to the lease
        if held:
            held.close()
        lease.close()
        raise
    return held


class Attachment:
    """A base or an adapter in the memory of its holder. Made by attach. Safe for use by several threads."""

    def __init__(self, document: dict[str, Any], lease: _Connection, path: str) -> None:
        self.document, self._path = document, path
        self.draining = False  # the holder is about to end, as of the last events(): let go of the tensors
        self.damaged = False  # an audit found other bytes than were published
        self.ended = False  # the holder has closed the lease
        self.generation: int = document["generation"]
        self._lease: _Connection | None = lease
        self._lock = threading.Lock()
        self._memory: list[Any] = []  # of each shard; None: it has no data
        self._table = {t["name"]: t for t in document["tensors"]}
        self._noted: list[dict[str, Any]] = []

    def _open(self, device: str | None, writable: bool) -> None:
        uuids = {v["index"]: v["uuid"] for v in self.document["devices"]}
        shards = self.document["shards"]
        total = sum("descriptor" in (p["ipc"] or {}) for s in shards for p in _places(s))
        asked = 0
        for s in shards:
            options: list[tuple[str, dict, int | None]] = []
            try:
                for place in _places(s) if s["data_nbytes"] else []:
                    fd = None
                    if "descriptor" in place["ipc"]:
                        if not self._lease.files:
                            count = min(MAX_DESCRIPTORS, total - asked)
                            self._lease.descriptors(asked, count, self._note)
                            asked += count
                        fd = self._lease.files.pop(0)
                    options.append((uuids[place["device"]], place["ipc"], fd))
                self._memory.append(self._one(options, s["data_nbytes"], device, writable) if options else None)
            finally:
                for _, _, fd in options:
                    if fd is not None:
                        os.close(fd)

    def _one(self, options: list[tuple[str, dict, int | None]], size: int, device: str | None, writable: bool) -> Any:
        visible = lambda uuid: _Cuda.load().ordinals.keys() >= {uuid}  # noqa: E731
        wanted = [o for o in options if o[0] == device]
        uuid, ipc, fd = (wanted or [o for o in options if len(options) == 1 or visible(o[0])] or options)[0]
        if ipc["kind"] == "memfd":
            return _HostMemory(self._lease, fd, ipc["offset"], size, writable)
        return _DeviceMemory(self._lease, uuid, ipc, fd, size)

    def tensors(self, *, copy: bool = False, align: int = 1) -> dict[str, torch.Tensor]:
        """All tensors, as torch has them, where they are. DeviceError or AttachError if torch can't have one.

        One is copied if its address is no multiple of its element's size, or of align, or if copy is set.
        """
        import torch

        flat = [m and m.tensor(torch) for m in self._open_memory()]
        return {name: _view(torch, t, flat[t["shard"]], copy, align) for name, t in self._table.items()}

    def buffers(self) -> dict[str, memoryview]:
        """The bytes of all tensors in host memory, read-only and not copied. DeviceError if one is on a device."""
        memory = self._open_memory()
        if any(isinstance(m, _DeviceMemory) for m in memory):
            raise DeviceError("the weights are on a device: tensors() gives them to torch, read() copies one")
        views = [memoryview(m.bytes()).toreadonly().cast("B") if m else memoryview(b"") for m in memory]
        return {n: views[t["shard"]][t["offset"] : t["offset"] + t["nbytes"]] for n, t in self._table.items()}

    def read(self, name: str) -> bytes:
        """A copy of the bytes of one tensor, from the host or a device. KeyError if there is none of that name."""
        t = self._table[name]
        memory = self._open_memory()[t["shard"]]
        return memory.read(t["offset"], t["nbytes"]) if t["nbytes"] else b""

    def events(self, timeout: float = 0.0) -> list[dict[str, Any]]:
        """What the holder has told since the last call; waits for something up to timeout, in seconds.

        It sets draining, damaged, ended and generation. Other kinds of events may come with later versions.
        """
        with self._lock:
            lease, until, ready = self._lease, time.monotonic() + timeout, select.poll()
            if lease:
                ready.register(lease.socket, select.POLLIN)
            while lease and not self.ended and not self._lines(lease):
                if not ready.poll(max(0.0, 1000 * (until - time.monotonic()))):
                    break
                lease.deadline = time.monotonic() + 30
                try:
                    self.ended = not lease.fill()
                except AttachError:
                    self.ended = True
            noted, self._noted = self._noted, []
            return noted

    def _lines(self, lease: _Connection) -> bool:
        while (at := lease.rest.find(b"\n", 0, MAX_LINE)) >= 0:
            self._note(_line(bytes(lease.rest[:at])))
            del lease.rest[: at + 1]
        if len(lease.rest) >= MAX_LINE:
            raise Untrusted(f"{lease.path}: the holder sent a line of more than {MAX_LINE} bytes")
        return bool(self._noted)

    def _note(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        self.draining |= kind == "draining"
        self.damaged |= kind == "damaged"
        if kind == "generation" and type(event.get("generation")) is int:
            self.generation = event["generation"]
        self._noted.append(event)

    def check(self) -> int:
        """Hashes every shard again: the number of bytes. Damaged if one is not what its digest says.

        Where the tensors are is compared with the headers, which are hashed too.
        """
        memory, total = self._open_memory(), 0
        for i, (s, m) in enumerate(zip(self.document["shards"], memory)):
            path = f"{self._path}/shards/{s['sha256']}/header"
            header = _Connection(self._lease.path, 30.0, self._lease.users).ask(path, most=MAX_HEADER)
            h = hashlib.sha256(header)
            for at in range(0, s["data_nbytes"], CHUNK):
                h.update(m.read(at, min(CHUNK, s["data_nbytes"] - at)))
            if "sha256:" + h.hexdigest() != s["sha256"] or len(header) + s["data_nbytes"] != s["size_bytes"]:
                raise Damaged(f"shard {s['name']!r} is not what its digest says: {s['sha256']}")
            if _told(header) != self._told_of(i):
                raise Damaged(f"shard {s['name']!r} has tensors elsewhere than its header says")
            total += s["size_bytes"]
        return total

    def _told_of(self, shard: int) -> dict[str, Any]:
        """What the document tells of the tensors of a shard, as a header would."""
        return {
            t["name"]: (t["dtype"], t["shape"], [t["offset"], t["offset"] + t["nbytes"]])
            for t in self.document["tensors"]
            if t["shard"] == shard
        }

    def _open_memory(self) -> list[Any]:
        if self._lease is None:
            raise AttachError("the attachment was closed")
        return self._memory

    def close(self) -> None:
        """Gives up the attachment. The lease ends with the last tensor or buffer. A second call does nothing."""
        with self._lock:
            self._memory, self._lease = [], None

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _told(header: bytes) -> dict[str, Any]:
    """The tensors of a safetensors header, of which the digest was found right."""
    try:
        tensors = json.loads(header[8:])
        tensors.pop("__metadata__", None)
        return {name: (t["dtype"], t["shape"], t["data_offsets"]) for name, t in tensors.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise Damaged("a header is not one of safetensors") from None


# Exit codes of the command, which are those of kiln-pull: by the code of a refusal, then by the kind of error.
REFUSALS = {
    "RESIDENT_DAMAGED": 1, "RESIDENT_OTHER_BASE": 1, "ADAPTER_OTHER_BASE": 1, "RESIDENT_OTHER_USER": 3,
    "ADAPTER_UNKNOWN": 4, "RESIDENT_FAILED": 6, "RESIDENT_NO_MEMORY": 8, "RESIDENT_DRAINING": 75, "RESIDENT_BUSY": 75,
}  # fmt: skip
FAILURES = ((Damaged, 1), (OtherUser, 3), (NoHolder, 4), (Unreachable, 6), (DeviceError, 8), (AttachError, 2))


def _view(torch: Any, t: dict[str, Any], flat: torch.Tensor | None, copy: bool, align: int) -> torch.Tensor:
    dtype, shape = getattr(torch, DTYPES[t["dtype"]][1], None), list(t["shape"])
    if dtype is None:
        raise AttachError(f"tensor {t['name']!r}: this torch has no {t['dtype']}; read() gives its bytes")
    if t["dtype"] == "F4":  # two in a byte
        if not shape or shape[-1] % 2:
            raise AttachError(f"tensor {t['name']!r}: torch can't have F4 of shape {shape}; read() gives its bytes")
        shape[-1] //= 2
    if not t["nbytes"]:
        return torch.empty(shape, dtype=dtype, device=flat.device if flat is not None else "cpu")
    part = flat[t["offset"] : t["offset"] + t["nbytes"]]
    width = max(1, DTYPES[t["dtype"]][0] // 8)
    # A view also needs an offset in the storage that is a multiple of the width.
    if copy or t["offset"] % width or part.data_ptr() % width or part.data_ptr() % align:
        part = part.clone()
    return part.view(dtype).view(shape)


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        description="Attach to resident weights and list the tensors.",
        epilog="Exit codes: 0 done, 1 other bytes or another base, 2 usage, or it could not be told, 3 not allowed, "
        "4 nobody holds that, 6 the holder failed, 8 the device failed, 75 it is busy or about to end.",
    )
    p.add_argument("aggregate", help="of the base: sha256:…")
    p.add_argument("--socket", help="path of the holder's socket (default: named by the aggregate)")
    p.add_argument("--adapter", metavar="DIGEST", help="an adapter on the base, by the digest of its manifest")
    p.add_argument("--holder-uid", type=int, metavar="UID", help="trust a holder of this user too")
    p.add_argument("--check", action="store_true", help="hash every byte again instead")
    a = p.parse_args(arguments)
    try:
        with attach(a.aggregate, a.socket, adapter=a.adapter, holder_uid=a.holder_uid) as held:
            if a.check:
                n = len(held.document["shards"])
                print(f"ok: {held.check()} bytes of {n} {'shard' if n == 1 else 'shards'} are {a.aggregate}")
                return 0
            for t in held.document["tensors"]:
                print(t["name"], t["dtype"], "x".join(map(str, t["shape"])) or "scalar", t["nbytes"], sep="\t")
            sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except AttachError as e:
        print(f"error: {e}", file=sys.stderr)
        return REFUSALS.get(getattr(e, "code", ""), next(code for kind, code in FAILURES if isinstance(e, kind)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
