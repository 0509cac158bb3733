"""What the tests attach to: kiln-pull resident as it is, and a holder of theirs that may send anything."""

from __future__ import annotations

import array
import copy
import fcntl
import hashlib
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any, Callable, Iterable

import kiln_attach

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
FAKE_CUDA = os.environ["FAKE_CUDA"]  # path of the stand-in for the driver


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """Writes tensors as name: (dtype, shape, bytes), one after another."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def model(folder: Path, shards: int, size: int = 1 << 16) -> dict[str, bytes]:
    """Writes a model of random bytes, a tensor in each shard, and gives their bytes."""
    folder.mkdir(parents=True)
    data = {f"t{i:05}": os.urandom(size + 16 * i) for i in range(shards)}
    names = {name: f"model-{i + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(data)}
    for name, bytes_ in data.items():
        safetensors(folder / names[name], {name: ("U8", [len(bytes_)], bytes_)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return data


def scratch(test: Any) -> Path:
    """A folder that is gone after the test. Sockets by default names are in it."""
    folder = Path(tempfile.mkdtemp())
    test.addCleanup(shutil.rmtree, folder)
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    os.environ.pop("RUNTIME_DIRECTORY", None)
    return folder


class Resident:
    """kiln-pull resident, with published weights. Use it in a with block."""

    def __init__(self, folder: Path, *arguments: str, device: str = "host", **environment: str) -> None:
        command = ["kiln-pull", "resident", str(folder), "--listen", "127.0.0.1:0", "--device", device, "--json"]
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "KILN_CUDA_LIB": FAKE_CUDA, **environment},
        )
        said = []
        for line in self.process.stdout:
            said.append(line)
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "resident":
                self.aggregate, self.socket = event["aggregate_sha256"], event["socket"]
                return
        self.process.wait()
        raise AssertionError("kiln-pull resident: " + "".join(said))

    def __enter__(self) -> Resident:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.communicate(timeout=60)

    def leases(self) -> int:
        return json.loads(kiln_attach._Connection(self.socket, 30, {os.geteuid()}).ask("/v1/resident"))["leases"]

    def until(self, leases: int) -> None:
        """Asks until there are so many leases, which ends with the test's own limit."""
        while self.leases() != leases:
            pass


def memfd(data: bytes, seals: int = SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def header(i: int, data: bytes) -> bytes:
    """The header of shard i, which has one tensor."""
    text = json.dumps({f"t{i}": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(text)) + text


def document(shards: list[bytes], headers: list[bytes] | None = None, **members: Any) -> dict[str, Any]:
    """A document of host memory, with one tensor in each shard; the first is empty if its bytes are."""
    headers = headers or [header(i, data) for i, data in enumerate(shards)]
    list_, tensors, descriptor = [], [], 0
    for i, data in enumerate(shards):
        ipc = {"kind": "memfd", "descriptor": descriptor, "offset": 0} if data else None
        descriptor += bool(data)
        digest = hashlib.sha256(headers[i] + data).hexdigest()
        size = len(headers[i]) + len(data)
        list_.append(
            {"name": f"{i}.safetensors", "sha256": f"sha256:{digest}", "size_bytes": size, "data_nbytes": len(data),
             "device": 0, "ipc": ipc}
        )  # fmt: skip
        tensors.append(
            {"name": f"t{i}", "dtype": "U8", "shape": [len(data)], "shard": i, "offset": 0, "nbytes": len(data),
             "aligned": True}
        )  # fmt: skip
    return {
        "schema_version": 1, "document_type": "kiln.resident-weights.v1",
        "aggregate_algorithm": "kiln.base-model-content.v1", "aggregate_sha256": kiln_attach.aggregate_of(list_),
        "verification": {
            "method": "sha256-full", "completed_at": "2026-12-01T03:00:00Z", "bytes": 1, "read_back": False,
        },
        "devices": [{"index": 0, "uuid": "", "pci": "", "backend": "host"}], "shards": list_, "tensors": tensors,
        "lease": {"id": "1", "mode": "zero_copy"}, "generation": 0, **copy.deepcopy(members),
    }  # fmt: skip


UPGRADE = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: kiln-attach\r\n\r\n"


class Holder:
    """Listens on a socket in a with block, and does to each connection in turn what it is told, on a thread.

    After an error in the block the thread has ended; else it is for the test to call join, when it has let go.
    """

    def __init__(self, path: Path, *serve: Callable[[socket.socket], None], uid: int = 0) -> None:
        self.path, self.serve = str(path), serve
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        before = os.geteuid()
        os.seteuid(uid or before)  # whom a client sees is who listens
        try:
            self.listener.listen()
        finally:
            os.seteuid(before)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.join = self.thread.join

    def run(self) -> None:
        for serve in self.serve:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                try:
                    serve(connection)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the client refused what it was sent, which is what most tests want

    def __enter__(self) -> Holder:
        self.thread.start()
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        os.unlink(self.path)
        if kind:
            self.thread.join()


def request(c: socket.socket) -> bytes:
    text = b""
    while not text.endswith(b"\r\n\r\n"):
        text += c.recv(4096) or b"\r\n\r\n"
    return text


def send_files(c: socket.socket, text: bytes, files: Iterable[int]) -> None:
    c.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])


def line(c: socket.socket) -> dict[str, Any] | None:
    text = b""
    while not text.endswith(b"\n"):
        more = c.recv(1)
        if not more:
            return None
        text += more
    return json.loads(text)


def serving(text: bytes | dict[str, Any], files: list[int] = []) -> Callable[[socket.socket], None]:
    """Serves a document and its descriptors as a holder should, until the client goes."""
    data = text if isinstance(text, bytes) else json.dumps(text).encode()

    def serve(c: socket.socket) -> None:
        request(c)
        c.sendall(UPGRADE + data + b"\n")
        while asked := line(c):
            d = asked["descriptors"]
            send_files(c, json.dumps(asked).encode() + b"\n", files[d["first"] : d["first"] + d["count"]])

    return serve
