"""A holder that lies: nothing of what it sends is used, and nothing of it is left behind."""

from __future__ import annotations

import copy
import json
import os
import re
import resource
import socket
import tempfile
import unittest
from typing import Any, Callable
from unittest import mock

import kiln_attach
from holders import SEALS, UPGRADE, Holder, document, header, line, memfd, request, scratch, send_files, serving

DATA = [b"a" * 64, b"b" * 32, b""]
OTHER = "sha256:" + "0" * 64


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets a member, as in shards.0.ipc.offset; Ellipsis removes it."""

    def do(d: Any) -> None:
        *way, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        for step in way:
            d = d[step]
        if value is ...:
            del d[last]
        else:
            d[last] = value

    return do


MEMBERS = [  # what is changed, and what the refusal says
    ("schema_version", 2, "schema_version is 2"),
    ("schema_version", "1", "schema_version is not what"),
    ("schema_version", True, "schema_version is not what"),
    ("document_type", "kiln.resident-adapter.v1", "document_type is"),
    ("aggregate_algorithm", "other", "aggregate_algorithm is"),
    ("aggregate_sha256", OTHER, "aggregate_sha256 is"),
    ("aggregate_sha256", "sha256:" + "A" * 64, "aggregate_sha256 is not what"),
    ("surprise", 1, "'surprise'"),
    ("generation", ..., "'generation'"),
    ("generation", -1, "-1 is not an integer"),
    ("generation", 2**53, "9007199254740992 is not an integer"),
    ("generation", 10**40, "is not an integer"),
    ("generation", 1.0, "1.0 is not an integer"),
    ("generation", float("nan"), "NaN is not an integer"),
    ("adapter", {"digest": OTHER, "name": "x"}, "another adapter"),
    ("verification.method", "sampled", "every byte"),
    ("lease", None, "no lease"),
    ("lease.mode", "drain", "no lease"),
    ("devices.1", None, None),
    ("devices.0.index", 1, "device that is not listed"),
    ("devices.0.uuid", "\ud800", "surrogates not allowed"),
    ("shards.0.surprise", 1, "'surprise'"),
    ("shards.0.sha256", OTHER, "another aggregate"),
    ("shards.0.size_bytes", 81, "another aggregate"),
    ("shards.0.size_bytes", 71, "64 bytes of data in 71"),
    ("shards.0.data_nbytes", 2**52, "bytes of data in 1"),
    ("shards.0.ipc", None, "and a handle: False"),
    ("shards.2.ipc", {"kind": "memfd", "descriptor": 2, "offset": 0}, "and a handle: True"),
    ("shards.0.ipc.kind", "posix", "kind 'posix'"),
    ("shards.0.ipc.kind", "cuda-ipc", "kind 'cuda-ipc'"),
    ("shards.0.ipc.kind", "vmm-fd", "kind 'vmm-fd'"),
    ("shards.0.ipc.handle", "AAAA", "kind 'memfd' with"),
    ("shards.0.ipc", {"kind": "cuda-ipc", "handle": "AAAA", "offset": 0}, "not of 64 bytes"),
    ("shards.0.ipc", {"kind": "cuda-ipc", "handle": "!" * 88, "offset": 0}, "base64"),
    ("shards.0.ipc", {"kind": "vmm-fd", "descriptor": 0, "allocation_bytes": 63, "offset": 0}, "outside of its memory"),
    ("shards.0.ipc.descriptor", 1, "descriptor 1, want 0"),
    ("shards.1.ipc.descriptor", 0, "descriptor 0, want 1"),
    ("shards.0.ipc.offset", 2**53 - 1, "outside of its memory"),
    ("shards.0.ipc.offset", 1, r"has 64 bytes, not 65"),
    ("shards.0.replicas", [{"device": 7, "ipc": None}], "device that is not listed"),
    ("tensors.0.dtype", "F7", "unknown dtype 'F7'"),
    ("tensors.0.dtype", "F32", "64 bytes for F32"),
    ("tensors.0.shape", [63], "64 bytes for U8"),
    ("tensors.0.shape", [2**52, 2**52], "too large"),
    ("tensors.0.shape", [0, 64], "64 bytes for U8"),
    ("tensors.0.shape", [True], r"shape\[0\] is not what"),
    ("tensors.0.shard", 3, "shard 3 of 3"),
    ("tensors.0.offset", 1, "outside of its shard"),
    ("tensors.0.aligned", False, "aligned: False"),
    ("tensors.0.nbytes", 2**53 - 1, "bytes for U8"),
    ("tensors.1.name", "t0", "there twice"),
    ("tensors.0.name", ..., "'name'"),
    ("tensors", {}, "tensors is not what"),
]

TEXTS = [
    (b"{}", "'aggregate_algorithm'"),
    (b"[1]", "document is not what"),
    (b"", "not a document"),
    (b'{"a":1,"a":1}', "twice"),
    (b"\xff\xfe", "codec can't decode"),
    (b"[" * 1_000_000, "recursion"),
    (b'{"generation":' + b"9" * 100_000 + b"}", "is not an integer"),
]


class Lies(unittest.TestCase):
    def setUp(self) -> None:
        self.path = scratch(self) / "socket"
        self.files = [memfd(d) for d in DATA if d]
        for fd in self.files:
            self.addCleanup(os.close, fd)
        self.document = document(DATA)
        self.open = len(os.listdir("/proc/self/fd"))

    def attach(self, *serve: Callable, timeout: float = 60, **arguments: Any) -> kiln_attach.Attachment:
        with Holder(self.path, *serve) as self.holder:
            return kiln_attach.attach(self.document["aggregate_sha256"], self.holder.path, timeout=timeout, **arguments)

    def refused(self, serve: Callable, says: str, kind: type = kiln_attach.Untrusted, **arguments: Any) -> None:
        with self.assertRaisesRegex(kind, says) as e:
            self.attach(serve, **arguments)
        self.assertNotIn("\n", str(e.exception))
        del e
        self.assertEqual(len(os.listdir("/proc/self/fd")), self.open, "descriptors were left open")

    def test_truth(self) -> None:
        held = self.attach(serving(self.document, self.files))
        self.assertEqual([bytes(b) for b in held.buffers().values()], DATA)
        del held
        self.holder.join()
        self.assertEqual(len(os.listdir("/proc/self/fd")), self.open)

    def test_members(self) -> None:
        for path, value, says in MEMBERS:
            if says is None:
                continue
            with self.subTest(path=path, value=value):
                d = json.loads(json.dumps(self.document))
                change(path, value)(d)
                self.refused(serving(d, self.files), says)

    def test_texts(self) -> None:
        for text, says in TEXTS:
            with self.subTest(text=text[:20]):
                self.refused(serving(text), says)

    def test_twice(self) -> None:
        self.document["devices"] *= 2
        self.refused(serving(self.document, self.files), "device is there twice")

    def test_adapter(self) -> None:
        adapter = {"digest": "sha256:" + "1" * 64, "name": "sql"}
        d = document(DATA, document_type="kiln.resident-adapter.v1", adapter=adapter)
        d["aggregate_sha256"] = OTHER  # an adapter's shards do not sum up to its base
        with Holder(self.path, serving(d, self.files)) as holder:
            held = kiln_attach.attach(OTHER, holder.path, adapter=adapter["digest"])
        self.assertEqual(held.read("t1"), DATA[1])
        del held
        for change_, says in (
            (change("adapter.digest", OTHER), "another adapter"),
            (change("adapter", ...), "another adapter"),
            (change("document_type", "kiln.resident-weights.v1"), "document_type is"),
            (change("aggregate_sha256", "sha256:" + "2" * 64), "aggregate_sha256 is"),
        ):
            bad = json.loads(json.dumps(d))
            change_(bad)
            with self.assertRaisesRegex(kiln_attach.Untrusted, says), Holder(self.path, serving(bad)) as holder:
                kiln_attach.attach(OTHER, holder.path, adapter=adapter["digest"])

    def test_memory(self) -> None:
        for what, file, says in (
            ("not sealed", memfd(DATA[0], 0), "not sealed"),
            ("may shrink", memfd(DATA[0], SEALS & ~2), "not sealed"),
            ("short", memfd(DATA[0][:-1]), "has 63 bytes, not 64"),
            ("a file", os.open(tempfile.mkstemp()[1], os.O_RDONLY), "not sealed"),
            ("a socket", os.dup(1), "not sealed"),
        ):
            self.addCleanup(os.close, file)
            self.open += 1
            with self.subTest(what):
                self.open = len(os.listdir("/proc/self/fd"))
                self.refused(serving(self.document, [file, self.files[1]]), says)

    def test_descriptors(self) -> None:
        def answer(text: bytes, files: list[int]) -> Callable[[socket.socket], None]:
            def serve(c: socket.socket) -> None:
                request(c)
                c.sendall(UPGRADE + json.dumps(self.document).encode() + b"\n")
                line(c)
                send_files(c, text, files)
                line(c)

            return serve

        two = b'{"descriptors":{"first":0,"count":2}}\n'
        others = "other descriptors than"
        self.refused(answer(two, self.files[:1]), others)
        self.refused(answer(two, self.files * 2), others)
        self.refused(answer(two, self.files * 33), "descriptors got lost", kiln_attach.AttachError)
        self.refused(answer(b'{"descriptors":{"first":1,"count":2}}\n', self.files), others)
        self.refused(answer(b"[]\n", self.files), "no object")
        self.refused(answer(b"x" * 100_000, self.files), "more than 65536 bytes")
        self.refused(answer(b'{"error":"no","code":"C"}\n', []), r"^no \(C\)$", kiln_attach.Refused)
        self.refused(answer(b"half", self.files), "did not answer in time|closed", kiln_attach.AttachError, timeout=1)

    def test_descriptors_between(self) -> None:
        """One shard is in more places than descriptors come at a time, and those that are missing are refused."""
        shard = next(s for s in self.document["shards"] if s["ipc"])
        self.document["devices"] += [
            {"index": i, "uuid": f"GPU-{i}", "pci": "", "backend": "cuda"} for i in range(1, kiln_attach.MAX_DESCRIPTORS + 2)
        ]
        first = shard["ipc"]["descriptor"]
        self.document["shards"] = [shard]
        self.document["tensors"] = []
        ipc = {"kind": "vmm-fd", "allocation_bytes": 1 << 21, "offset": 0}
        shard["replicas"] = [
            {"device": d["index"], "ipc": {**ipc, "descriptor": first + d["index"]}} for d in self.document["devices"][1:]
        ]
        self.document["aggregate_sha256"] = kiln_attach.aggregate_of([shard])

        def serve(c: socket.socket) -> None:
            request(c)
            c.sendall(UPGRADE + json.dumps(self.document).encode() + b"\n")
            asked = line(c)
            send_files(c, json.dumps(asked).encode() + b"\n", self.files[:1] * asked["descriptors"]["count"])
            line(c)
            c.sendall(b'{"error":"no more","code":"C"}\n')
            line(c)

        self.refused(serve, r"^no more \(C\)$", kiln_attach.Refused)

    def test_pieces(self) -> None:
        """Every byte by itself, an event first, and the descriptors before the line that they belong to."""

        def serve(c: socket.socket) -> None:
            request(c)
            for byte in UPGRADE + json.dumps(self.document).encode() + b"\n":
                c.send(bytes([byte]))
            answer = json.dumps(line(c)).encode() + b"\n"
            send_files(c, b'{"event":"generation","generation":4}\n' + answer[:5], self.files)
            c.sendall(answer[5:] + b'{"event":"later"}\n{"event":"draining","grace_seconds":1}\n')

        held = self.attach(serve)
        self.assertEqual([bytes(b) for b in held.buffers().values()], DATA)
        events = held.events() + held.events(timeout=60)
        self.assertEqual([e["event"] for e in events], ["generation", "later", "draining"])
        self.assertEqual((held.generation, held.draining, held.damaged), (4, True, False))

    def test_http(self) -> None:
        def answer(text: bytes) -> Callable[[socket.socket], None]:
            def serve(c: socket.socket) -> None:
                request(c)
                c.sendall(text)

            return serve

        refused = b'{"error":"is about to end","code":"RESIDENT_DRAINING"}'
        head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n" % len(refused)
        self.refused(answer(head + refused), r"^is about to end \(RESIDENT_DRAINING\)$", kiln_attach.Refused)
        self.refused(answer(b"HTTP/1.1 500 Oh\r\n\r\n<html>"), "answered 500", kiln_attach.Refused)
        self.refused(answer(b"HTTP/1.1 200 OK\r\n\r\n{}"), "answered 200", kiln_attach.Refused)
        self.refused(answer(b"SSH-2.0-x\r\n\r\n"), "does not speak HTTP")
        self.refused(answer(b"x" * 100_000), "more than 65536 bytes")
        self.refused(answer(b""), "closed the connection", kiln_attach.AttachError)

    def test_damage(self) -> None:
        """Memory that is not what its digest says is found by check alone."""
        wrong = [memfd(b"A" + DATA[0][1:]), self.files[1]]
        self.addCleanup(os.close, wrong[0])

        def headers(c: socket.socket) -> None:
            found = re.match(rb"GET /v1/resident/sha256:[0-9a-f]{64}/shards/(sha256:[0-9a-f]{64})/header ", request(c))
            i = [s["sha256"].encode() for s in self.document["shards"]].index(found[1])
            c.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + header(i, DATA[i]))

        moved = copy.deepcopy(self.document)
        moved["tensors"][0]["dtype"] = "I8"
        for document, files, says in (
            (self.document, self.files, None),
            (self.document, wrong, "'0.safetensors' is not what its digest says"),
            (moved, self.files, "'0.safetensors' has tensors elsewhere than its header says"),
        ):
            lease: list[socket.socket] = []

            def serve(c: socket.socket) -> None:
                request(c)
                c.sendall(UPGRADE + json.dumps(document).encode() + b"\n")
                send_files(c, json.dumps(line(c)).encode() + b"\n", files)
                lease.append(c.dup())  # goes on while the headers are asked for

            with Holder(self.path, serve, *[headers] * 3) as holder:
                held = kiln_attach.attach(self.document["aggregate_sha256"], holder.path)
                if says:
                    with self.assertRaisesRegex(kiln_attach.Damaged, says):
                        held.check()
                else:
                    self.assertEqual(held.check(), sum(s["size_bytes"] for s in document["shards"]))
            lease[0].close()

    def test_other_user(self) -> None:
        """A holder of another user is not believed, also by root; nor is a folder where others could put a socket."""
        holder = Holder(self.path, *[serving(self.document, self.files)] * 2, uid=65534)
        with holder:
            with self.assertRaisesRegex(kiln_attach.OtherUser, "held by user ID 65534"):
                kiln_attach.attach(self.document["aggregate_sha256"], holder.path)
            kiln_attach.attach(self.document["aggregate_sha256"], holder.path, holder_uid=65534).close()
        with mock.patch.dict(os.environ, {"XDG_RUNTIME_DIR": str(self.path.parent), "RUNTIME_DIRECTORY": "relative"}):
            (self.path.parent / "kiln").mkdir(mode=0o755)
            with self.assertRaisesRegex(kiln_attach.OtherUser, "is not a folder of user ID 0 alone"):
                kiln_attach.attach(self.document["aggregate_sha256"])

    def test_many_descriptors(self) -> None:
        """Events come also where more than 1024 descriptors are open."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        null = os.open(os.devnull, os.O_RDONLY)
        for fd in [null] + [os.dup(null) for _ in range(1100)]:
            self.addCleanup(os.close, fd)
        event = b'{"event":"draining","grace_seconds":1}\n'

        def serve(c: socket.socket) -> None:
            request(c)
            c.sendall(UPGRADE + json.dumps(self.document).encode() + b"\n")
            send_files(c, json.dumps(line(c)).encode() + b"\n", self.files)
            c.sendall(event)

        with Holder(self.path, serve) as holder:
            with kiln_attach.attach(self.document["aggregate_sha256"], holder.path) as held:
                self.assertGreater(held._lease.socket.fileno(), 1024)
                self.assertEqual(held.events(10), [json.loads(event)])
                self.assertTrue(held.draining)


if __name__ == "__main__":
    unittest.main()
