"""Weights on a device: kiln-pull resident and this process on the stand-in for the CUDA driver."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

import kiln_attach
from holders import FAKE_CUDA, Holder, Resident, document, model, scratch, serving

os.environ["KILN_CUDA_LIB"] = FAKE_CUDA


class Prop(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location_type", ctypes.c_int),
        ("device", ctypes.c_int), ("win32", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8),
    ]  # fmt: skip


class Device(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = scratch(self)
        self.cuda = kiln_attach._Cuda.load()
        self.cuda.lib.fakecuda_get.restype = ctypes.c_longlong
        self.cuda.lib.fakecuda_set.argtypes = [ctypes.c_char_p, ctypes.c_longlong]
        self.addCleanup(self.cuda.lib.fakecuda_reset)
        self.before = self.held()

    def held(self) -> dict[str, int]:
        names = ["USED", "RANGES", "PHYSICAL", "STREAMS"]
        held = {n: self.cuda.lib.fakecuda_get(n.encode()) for n in names}
        return {**held, "mapped": Path("/proc/self/maps").read_text().count("memfd:fakecuda")}

    def set(self, name: str, value: int) -> None:
        self.assertEqual(self.cuda.lib.fakecuda_set(name.encode(), value), 1)

    def test_ipc(self) -> None:
        data = model(self.folder / "m", 3)
        with Resident(self.folder / "m", device="cuda:0") as r:
            with kiln_attach.attach(r.aggregate) as held:
                self.assertEqual({s["ipc"]["kind"] for s in held.document["shards"]}, {"cuda-ipc"})
                self.assertEqual({n: held.read(n) for n in data}, data)
                self.assertEqual(held.check(), sum(f.stat().st_size for f in (self.folder / "m").glob("*.safetensors")))
                with self.assertRaisesRegex(kiln_attach.DeviceError, "on a device"):
                    held.buffers()
                self.assertEqual(self.held()["mapped"], self.before["mapped"] + 3)
            del held
            self.assertEqual(self.held(), self.before)
            r.until(leases=0)

    def test_interface_keeps_the_lease(self) -> None:
        model(self.folder / "m", 1)
        with Resident(self.folder / "m", device="cuda:0") as r:
            with kiln_attach.attach(r.aggregate) as held:
                memory = held._memory[0]  # what torch keeps
            size = held.document["shards"][0]["data_nbytes"]
            self.assertEqual(
                memory.__cuda_array_interface__,
                {"shape": (size,), "typestr": "|u1", "data": (memory.address, False), "strides": None, "version": 3},
            )
            self.assertEqual(r.leases(), 1)
            del memory
            r.until(leases=0)
            self.assertEqual(self.held(), self.before)

    def test_device_not_visible(self) -> None:
        model(self.folder / "m", 1)
        with Resident(self.folder / "m", device="cuda:1", FAKECUDA_DEVICES="2") as r:
            with self.assertRaisesRegex(kiln_attach.DeviceError, "device GPU-.* is not visible"):
                kiln_attach.attach(r.aggregate)
            r.until(leases=0)

    def test_driver_fails(self) -> None:
        """In a process of its own: an error of this kind ends the use of a context."""
        model(self.folder / "m", 1)
        with Resident(self.folder / "m", device="cuda:0") as r:
            for says, environment in (
                (r"its driver can't be loaded: /none/libcuda.so.1: .*", {"KILN_CUDA_LIB": "/none/libcuda.so.1"}),
                (r"cuInit: CUDA_ERROR_NO_DEVICE \(100\)", {"FAKECUDA_DEVICES": "0"}),
                (r"cuMemcpyDtoHAsync_v2: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)", {"FAKECUDA_FAIL_READ": "1"}),
                (
                    r"cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)",
                    {"FAKECUDA_FAIL_READ": "1", "FAKECUDA_FAIL_AT": "2"},
                ),
            ):
                command = [sys.executable, kiln_attach.__file__, r.aggregate, "--check"]
                p = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
                self.assertEqual(p.returncode, 8)
                self.assertRegex(p.stderr, f"error: .*{says}\n")
            r.until(leases=0)

    def vmm(self, data: bytes) -> tuple[int, int]:
        """Memory with these bytes, of which only a descriptor is left, and its size."""
        cuda, n, zero = self.cuda, ctypes.c_size_t(2 << 20), ctypes.c_ulonglong(0)
        memory, at, fd, stream = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int(), ctypes.c_void_p()
        prop, access = Prop(1, 1, 1, 0), kiln_attach._Access(1, 0, 3)
        with cuda.on(0):
            cuda("cuMemCreate", ctypes.byref(memory), n, ctypes.byref(prop), zero)
            cuda("cuMemAddressReserve", ctypes.byref(at), n, ctypes.c_size_t(0), zero, zero)
            cuda("cuMemMap", at, n, ctypes.c_size_t(0), memory, zero)
            cuda("cuMemSetAccess", at, n, ctypes.byref(access), ctypes.c_size_t(1))
            cuda("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))
            cuda("cuMemcpyHtoDAsync_v2", at, data, ctypes.c_size_t(len(data)), stream)
            cuda("cuStreamSynchronize", stream)
            cuda("cuStreamDestroy_v2", stream)
            cuda("cuMemExportToShareableHandle", ctypes.byref(fd), memory, ctypes.c_int(1), zero)
            cuda("cuMemUnmap", at, n)
            cuda("cuMemAddressFree", at, n)
            cuda("cuMemRelease", memory)
        return fd.value, n.value

    def test_descriptors(self) -> None:
        data = [os.urandom(1000), os.urandom(70)]
        made = [self.vmm(d) for d in data]
        d = self.document(data, made)
        before = self.held()
        for setting in (None, "NO_READ_ONLY"):
            if setting:
                self.set(setting, 1)
            with Holder(self.folder / "s", serving(d, [fd for fd, _ in made])) as holder:
                held = kiln_attach.attach(d["aggregate_sha256"], holder.path)
            self.assertEqual([held.read("t0"), held.read("t1")], data)
            self.assertEqual(self.held()["RANGES"], before["RANGES"] + 2)
            del held
            holder.join()
            self.assertEqual(self.held(), before)
        for call in range(1, 6):  # each call of the first shard fails once: import, reserve, map, two of access
            self.set("FAIL_VMM", call)
            self.cuda.lib.fakecuda_set(b"VMM", 0)
            with self.subTest(call=call):
                if call == 4:
                    continue  # access for reading, which is tried again
                with self.assertRaises(kiln_attach.DeviceError):
                    with Holder(self.folder / "s", serving(d, [fd for fd, _ in made])) as holder:
                        kiln_attach.attach(d["aggregate_sha256"], holder.path)
                self.assertEqual(self.held(), before)
        for fd, _ in made:
            os.close(fd)

    def document(self, data: list[bytes], made: list[tuple[int, int]]) -> dict[str, Any]:
        (uuid,) = self.cuda.ordinals
        d = document(data, devices=[{"index": 3, "uuid": uuid, "pci": "", "backend": "cuda"}])
        for i, (s, (_, size)) in enumerate(zip(d["shards"], made)):
            s["device"] = 3
            s["ipc"] = {"kind": "vmm-fd", "descriptor": i, "allocation_bytes": size, "offset": 0}
        return d

    def test_replicas(self) -> None:
        """Of two places the one that is visible, of several the one that was asked for."""
        data = [os.urandom(64)]
        (fd, size), (other, _) = self.vmm(data[0]), self.vmm(b"x" * 64)
        d = self.document(data, [(fd, size)])
        shard, here = d["shards"][0], d["devices"][0]
        d["devices"] = [{**here, "index": 0, "uuid": "GPU-none"}, here, {**here, "index": 4}]
        shard["device"] = 0
        shard["replicas"] = [
            {"device": 3, "ipc": {**shard["ipc"], "descriptor": 1}},
            {"device": 4, "ipc": {**shard["ipc"], "descriptor": 2}},
        ]
        before = self.held(), len(os.listdir("/proc/self/fd"))
        with Holder(self.folder / "s", serving(d, [other, fd, other])) as holder:
            held = kiln_attach.attach(d["aggregate_sha256"], holder.path)
        self.assertEqual(held.read("t0"), data[0])
        del held
        holder.join()
        self.assertEqual((self.held(), len(os.listdir("/proc/self/fd"))), before)
        with Holder(self.folder / "s", serving(d, [other, fd, other])) as holder:
            with self.assertRaisesRegex(kiln_attach.DeviceError, "GPU-none is not visible"):
                kiln_attach.attach(d["aggregate_sha256"], holder.path, device="GPU-none")
        os.close(fd)
        os.close(other)


if __name__ == "__main__":
    unittest.main()
