#!/usr/bin/env python3
"""Prints the aggregate of a model folder: an independent reading of kiln.base-model-content.v1, to check others by."""
import hashlib, json, pathlib, struct, sys

folder = pathlib.Path(sys.argv[1])
index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else None
files = [folder / n for n in names] if names else [single] if single.exists() else list(folder.glob("*.safetensors"))
records = sorted((hashlib.sha256(data := f.read_bytes()).digest(), len(data)) for f in files)
text = b"kiln.base-model-content.v1\0" + struct.pack("<Q", len(records))
text += b"".join(struct.pack("<Q", size) + digest for digest, size in records)
print("sha256:" + hashlib.sha256(text).hexdigest())
