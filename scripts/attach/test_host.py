"""Weights in host memory of kiln-pull resident, without torch."""

from __future__ import annotations

import ast
import ctypes
import os
import re
import signal
import subprocess
import sys
import unittest
from pathlib import Path

import kiln_attach
from holders import Resident, model, scratch

CLIENT = kiln_attach.__file__


def client(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, CLIENT, *arguments], capture_output=True, text=True)


class Host(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = scratch(self)

    def test_bytes(self) -> None:
        data = model(self.folder / "m", 3)
        with Resident(self.folder / "m") as r, kiln_attach.attach(r.aggregate) as held:
            self.assertEqual({n: bytes(b) for n, b in held.buffers().items()}, data)
            self.assertEqual({n: held.read(n) for n in data}, data)
            files = (self.folder / "m").glob("*.safetensors")
            self.assertEqual(held.check(), sum(f.stat().st_size for f in files))
            with self.assertRaises(KeyError):
                held.read("none")

    def test_many_shards(self) -> None:
        data = model(self.folder / "m", 130, 100)
        with Resident(self.folder / "m") as r, kiln_attach.attach(r.aggregate) as held:
            files = len(os.listdir("/proc/self/fd"))
            self.assertEqual({n: bytes(b) for n, b in held.buffers().items()}, data)
            self.assertLess(files, 100, "descriptors are kept")

    def test_same_file_twice(self) -> None:
        data = model(self.folder / "m", 1)
        (self.folder / "m" / "model.safetensors.index.json").unlink()
        (file,) = (self.folder / "m").iterdir()
        (self.folder / "m" / "again.safetensors").write_bytes(file.read_bytes())
        with Resident(self.folder / "m") as r, kiln_attach.attach(r.aggregate) as held:
            self.assertEqual((len(held.document["shards"]), held.read("t00000")), (2, data["t00000"]))

    def test_other_aggregate(self) -> None:
        model(self.folder / "m", 1)
        other = "sha256:" + "0" * 64
        with Resident(self.folder / "m") as r:
            with self.assertRaisesRegex(kiln_attach.Refused, r"held is .* \(RESIDENT_OTHER_BASE\)") as e:
                kiln_attach.attach(other, r.socket)
            self.assertEqual(e.exception.code, "RESIDENT_OTHER_BASE")
            with self.assertRaises(kiln_attach.NoHolder):
                kiln_attach.attach(other)
            with self.assertRaisesRegex(kiln_attach.AttachError, "is no digest"):
                kiln_attach.attach(r.aggregate[7:])
            with self.assertRaisesRegex(kiln_attach.Refused, r"ADAPTER_UNKNOWN|RESIDENT_UNKNOWN"):
                kiln_attach.attach(r.aggregate, adapter=other)

    def test_lease_lasts_as_long_as_a_buffer(self) -> None:
        data = model(self.folder / "m", 2)
        with Resident(self.folder / "m") as r:
            with kiln_attach.attach(r.aggregate) as held:
                one = held.buffers()["t00001"][10:20]
            with self.assertRaisesRegex(kiln_attach.AttachError, "closed"):
                held.buffers()
            held.close()
            self.assertEqual(r.leases(), 1)
            self.assertEqual(bytes(one), data["t00001"][10:20])
            del one
            r.until(leases=0)

    def test_killed_client(self) -> None:
        model(self.folder / "m", 1)
        code = "import sys, kiln_attach; a = kiln_attach.attach(sys.argv[1]); print(flush=True); sys.stdin.read()"
        with Resident(self.folder / "m") as r:
            with subprocess.Popen(
                [sys.executable, "-c", code, r.aggregate], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as p:
                p.stdout.readline()
                self.assertEqual(r.leases(), 1)
                p.kill()
            r.until(leases=0)

    def test_draining(self) -> None:
        model(self.folder / "m", 1)
        with Resident(self.folder / "m", "--drain-timeout", "60s") as r:
            held = kiln_attach.attach(r.aggregate)
            self.assertEqual(held.events(), [])
            r.process.terminate()
            self.assertEqual([e["event"] for e in held.events(timeout=60)], ["draining"])
            self.assertTrue(held.draining)
            self.assertFalse(held.ended)
            with self.assertRaises((kiln_attach.Refused, kiln_attach.NoHolder)):
                kiln_attach.attach(r.aggregate, r.socket)
            held.close()
            self.assertEqual(r.process.wait(60), 0)

    def test_killed_holder(self) -> None:
        data = model(self.folder / "m", 2)
        with Resident(self.folder / "m") as r, kiln_attach.attach(r.aggregate) as held:
            buffers = held.buffers()
            r.process.kill()
            r.process.wait()
            self.assertEqual(held.events(timeout=60), [])
            self.assertTrue(held.ended)
            self.assertEqual({n: bytes(b) for n, b in buffers.items()}, data)
            self.assertEqual(kiln_attach.Attachment.events(held), [])

    def test_no_copy(self) -> None:
        size = 64 << 20
        model(self.folder / "m", 1, size)
        with Resident(self.folder / "m") as r, kiln_attach.attach(r.aggregate) as held:
            (buffer,) = held.buffers().values()
            before = rss_anon()
            self.assertEqual(len(bytes(buffer[::4096])), size >> 12)  # every page
            self.assertLess(rss_anon() - before, 4 << 20)
            found = mapping(held._memory[0].address)
            self.assertGreaterEqual(found["Rss"], size >> 10)
            self.assertEqual(found["Anonymous"], 0)
            files = Path(f"/proc/{r.process.pid}/fd").iterdir()
            self.assertIn(found["inode"], [f.stat().st_ino for f in files if "memfd" in os.readlink(f)])

    def test_no_write(self) -> None:
        data = model(self.folder / "m", 1)["t00000"]
        code = (
            "import sys, ctypes, kiln_attach; a = kiln_attach.attach(sys.argv[1]);"
            "print(flush=True); ctypes.memset(a._memory[0].address, 1, 1)"
        )
        with Resident(self.folder / "m") as r:
            p = subprocess.run([sys.executable, "-c", code, r.aggregate], capture_output=True)
            self.assertEqual((p.stdout, p.returncode), (b"\n", -signal.SIGSEGV))
            with kiln_attach.attach(r.aggregate) as held, self.assertRaises(TypeError):
                held.buffers()["t00000"][0] = 1
            with kiln_attach.attach(r.aggregate, writable=True) as own:
                ctypes.memset(own._memory[0].address, data[0] ^ 1, 1)
                self.assertEqual(own.read("t00000")[0], data[0] ^ 1)
            with kiln_attach.attach(r.aggregate) as held:
                self.assertEqual(held.read("t00000"), data)

    def test_command(self) -> None:
        model(self.folder / "m", 2, 64)
        with Resident(self.folder / "m") as r:
            p = client(r.aggregate)
            self.assertEqual((p.returncode, p.stdout), (0, "t00000\tU8\t64\t64\nt00001\tU8\t80\t80\n"), p.stderr)
            p = client(r.aggregate, "--check", "--socket", r.socket)
            self.assertRegex(p.stdout, f"^ok: [0-9]+ bytes of 2 shards are {r.aggregate}\n$")
            p = client("sha256:" + "0" * 64, "--socket", r.socket)
            self.assertEqual(p.returncode, 1)
            self.assertRegex(p.stderr, r"^error: held is .* \(RESIDENT_OTHER_BASE\)\n$")
        p = client(r.aggregate)
        self.assertEqual(p.returncode, 4)
        self.assertRegex(p.stderr, "^error: no resident weights at /")


class File(unittest.TestCase):
    def test_needs_nothing(self) -> None:
        tree = ast.parse(Path(CLIENT).read_text(), feature_version=(3, 9))
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        self.assertEqual(names - {"torch"} - sys.stdlib_module_names, set())


def rss_anon() -> int:
    return int(re.search(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text())[1]) << 10


def mapping(address: int) -> dict[str, int]:
    """The inode of the mapping that begins there, and what /proc/self/smaps says of it, in KiB."""
    at = rf"^{address:x}-\S+ \S+ \S+ \S+ (\d+) .*\n((?:[A-Z].*\n)+)"
    found = re.search(at, Path("/proc/self/smaps").read_text(), re.M)
    return {"inode": int(found[1]), **{k: int(v) for k, v in re.findall(r"(\w+): +(\d+) kB", found[2])}}


if __name__ == "__main__":
    unittest.main()
