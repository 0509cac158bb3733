"""vLLM itself, in its build for CPUs, with the load format kiln."""

from __future__ import annotations

import os
import shutil
import unittest
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)  # fmt: skip

import kiln_attach
from holders import Resident, scratch

MODEL = Path(os.environ["MODEL"])
SENTENCES = ["a cat sat on the mat", "weights stay where they are"]


def embed(folder: Path, **arguments: Any) -> list[list[float]]:
    from vllm import LLM

    llm = LLM(str(folder), runner="pooling", enforce_eager=True, max_model_len=256, dtype="float32", **arguments)
    return [o.outputs.embedding for o in llm.embed(SENTENCES, use_tqdm=False)]


class Vllm(unittest.TestCase):
    def test_serves_the_same(self) -> None:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        import vllm_kiln

        folder = scratch(self) / "bare"  # without weights
        shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        made = []
        create = vllm_kiln.KilnModelLoader.create_model
        vllm_kiln.KilnModelLoader.create_model = lambda *a, **k: made.append(1) or create(*a, **k)
        other = "sha256:" + "0" * 64
        with Resident(MODEL) as r:
            base = {"aggregate": r.aggregate}
            for wrong, says in (
                ({"aggregate": other, "socket": r.socket}, "RESIDENT_OTHER_BASE"),
                ({**base, "adapters": [other]}, "ADAPTER_UNKNOWN|RESIDENT_UNKNOWN"),
                ({**base, "adapter": other}, "extra config"),
                ({}, "extra config"),
            ):
                with self.subTest(wrong), self.assertRaisesRegex((kiln_attach.AttachError, ValueError), says):
                    embed(folder, load_format="kiln", model_loader_extra_config=wrong)
            self.assertEqual(made, [], "a model was made before the refusal")
            kiln = embed(folder, load_format="kiln", model_loader_extra_config=base)
            self.assertEqual(made, [1])
            r.until(leases=0)
        self.assertEqual(kiln, embed(MODEL, load_format="safetensors"))


if __name__ == "__main__":
    unittest.main()
