"""Tensors of torch, and what is served from them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import unittest
import urllib.request
from pathlib import Path

import torch
from safetensors.torch import load_file

import kiln_attach
from holders import Resident, safetensors, scratch

MODEL = Path(os.environ["MODEL"])
SERVE = Path(kiln_attach.__file__).parent / "example" / "serve.py"


class Tensors(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = scratch(self)
        (self.folder / "m").mkdir()
        self.file = self.folder / "m" / "model.safetensors"

    def test_model(self) -> None:
        shutil.copy(MODEL / "model.safetensors", self.file)
        want = load_file(self.file)
        with Resident(self.folder / "m") as r:
            with kiln_attach.attach(r.aggregate) as held:
                have = held.tensors()
            self.assertEqual(have.keys(), want.keys())
            for name, t in want.items():
                self.assertEqual((have[name].dtype, have[name].shape), (t.dtype, t.shape))
                self.assertTrue(torch.equal(have[name], t), name)
            self.assertEqual(len({t.untyped_storage().data_ptr() for t in have.values()}), 1, "something was copied")
            one = have.popitem()[1]
            have.clear()
            self.assertEqual(r.leases(), 1)
            self.assertEqual(float(one.float().sum()), float(one.float().sum()))
            del one, t
            r.until(leases=0)

    def test_dtypes(self) -> None:
        """Each dtype, of an even and an odd place, in the order that makes offsets odd."""
        tensors, names = {}, [n for n, (bits, name) in kiln_attach.DTYPES.items() if name]
        for i, dtype in enumerate(names):
            size = 6 * kiln_attach.DTYPES[dtype][0] // 8
            data = bytes(b & 1 for b in os.urandom(size)) if dtype == "BOOL" else os.urandom(size)
            tensors[f"{i:02}{dtype}"] = (dtype, [3, 2], data)
            tensors[f"{i:02}odd"] = ("U8", [i % 2], b"x" * (i % 2))
        tensors["scalar"] = ("F32", [], os.urandom(4))
        safetensors(self.file, tensors)
        with Resident(self.folder / "m") as r, kiln_attach.attach(r.aggregate) as held:
            have = held.tensors()
            cloned = 0
            for name, (dtype, shape, data) in tensors.items():
                t = have[name]
                self.assertEqual(t.dtype, getattr(torch, kiln_attach.DTYPES[dtype][1]))
                self.assertEqual(list(t.shape), [3, 1] if dtype == "F4" else shape)
                raw = t.reshape(-1).contiguous().view(torch.uint8) if t.numel() else []
                self.assertEqual(bytes(int(b) for b in raw), data, name)
                cloned += t.untyped_storage().nbytes() == len(data) > 1
            self.assertGreater(cloned, 0, "no tensor was at an odd place")
            self.assertTrue(all(t.data_ptr() % 16 == 0 for t in held.tensors(align=16).values() if t.numel()))

    def test_no_such_dtype(self) -> None:
        safetensors(self.file, {"t": ("F6_E2M3", [4], b"abc")})
        with Resident(self.folder / "m") as r, kiln_attach.attach(r.aggregate) as held:
            with self.assertRaisesRegex(kiln_attach.AttachError, "'t': this torch has no F6_E2M3"):
                held.tensors()
            self.assertEqual(held.read("t"), b"abc")

    def test_copy(self) -> None:
        safetensors(self.file, {"t": ("F32", [2], bytes(8))})
        with Resident(self.folder / "m") as r:
            with kiln_attach.attach(r.aggregate) as held:
                own = held.tensors(copy=True)["t"]
            r.until(leases=0)
            own += 1
            with kiln_attach.attach(r.aggregate, writable=True) as held:
                private = held.tensors()["t"]
            private += 2
            with kiln_attach.attach(r.aggregate) as held:
                self.assertEqual(
                    [t.tolist() for t in (own, private, held.tensors()["t"])], [[1, 1], [2, 2], [0, 0]]
                )


class Serving(unittest.TestCase):
    def answer(self, *arguments: str) -> bytes:
        with subprocess.Popen([sys.executable, str(SERVE), *arguments], stdout=subprocess.PIPE, text=True) as p:
            try:
                body = json.dumps({"sentences": ["a cat sat on the mat", "weights stay where they are", ""]}).encode()
                return urllib.request.urlopen(p.stdout.readline().strip(), body, 60).read()
            finally:
                p.kill()

    def test_same_answers(self) -> None:
        folder = scratch(self) / "bare"  # without weights
        shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        from_disk = self.answer(str(MODEL))
        self.assertEqual(len(json.loads(from_disk)["embeddings"][1]), 384)
        with Resident(MODEL) as r:
            self.assertEqual(self.answer(str(folder), "--aggregate", r.aggregate), from_disk)
            r.until(leases=0)


if __name__ == "__main__":
    unittest.main()
