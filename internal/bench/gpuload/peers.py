"""Brings the tensors of all shards of a folder into host memory: peers.py runai|safetensors DIR. Says how many bytes
they have, how long that took, and how many processor seconds, without the start of Python and what it loads."""

import glob
import json
import os
import struct
import sys
import time
import types


def headers(paths):
    """The place of the data and the tensors of each shard, in the order of their bytes."""
    for path in paths:
        with open(path, "rb") as f:
            (n,) = struct.unpack("<Q", f.read(8))
            head = json.loads(f.read(n))
        head.pop("__metadata__", None)
        yield 8 + n, sorted(t["data_offsets"] for t in head.values())


def bare_package(name):
    """Lets the modules of a package be imported without its __init__, which wants torch."""
    package = types.ModuleType(name)
    for folder in sys.path:
        if os.path.isdir(os.path.join(folder, name)):
            package.__path__ = [os.path.join(folder, name)]
    sys.modules[name] = package


def runai():
    import numpy

    bare_package("runai_model_streamer")
    from runai_model_streamer.libstreamer import libstreamer

    def load(paths):
        counts, offsets, sizes, places, held = [], [], [], [], []
        for start, tensors in headers(paths):
            held.append(numpy.empty(tensors[-1][1], numpy.uint8))
            base = held[-1].ctypes.data
            counts.append(len(tensors))
            for begin, end in tensors:
                offsets.append(start + begin)
                sizes.append(end - begin)
                places.append(base + begin)
        streamer = libstreamer.runai_start()
        libstreamer.runai_request(streamer, paths, counts, offsets, sizes, places)
        for _ in sizes:
            response = libstreamer.runai_response(streamer)
            if response is None or response[0] != 0:
                raise SystemExit(f"runai: {response}")
        libstreamer.runai_end(streamer)
        return held, sum(sizes)

    return load


def safetensors():
    import ml_dtypes  # numpy then knows bfloat16
    from safetensors.numpy import load_file

    def load(paths):
        held = [load_file(path) for path in paths]
        return held, sum(t.nbytes for shard in held for t in shard.values())

    return load


load = {"runai": runai, "safetensors": safetensors}[sys.argv[1]]()
paths = sorted(glob.glob(os.path.join(sys.argv[2], "*.safetensors")))
began, used = time.monotonic(), time.process_time()
held, size = load(paths)
took, used = time.monotonic() - began, time.process_time() - used
with open("/proc/self/status") as f:
    resident = next(int(line.split()[1]) for line in f if line.startswith("RssAnon:")) << 10
if resident < size:
    raise SystemExit(f"{sys.argv[1]}: {resident} of {size} bytes are in memory")
print(size, took, used)
